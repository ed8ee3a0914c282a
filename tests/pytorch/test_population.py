from __future__ import annotations

import numpy as np
import pytest
from support.parts import number_of, numbers
from torch.utils.data import Subset

from stoker.errors import ConfigError
from stoker.pytorch import SampleDataset
from stoker.pytorch.population import DatasetPopulation


def base() -> SampleDataset:
    return SampleDataset(numbers(20), number_of)


def test_the_whole_data_set() -> None:
    population = DatasetPopulation(base())
    assert (len(population), population.label) == (20, "")
    assert population.ids(np.array([3, -1])).tolist() == [3, 19]
    assert population.sizes(population.base.source.sizes).shape == (20,)


def test_nested_subsets_and_repeats() -> None:
    dataset = base()
    population = DatasetPopulation(Subset(Subset(dataset, [5, 6, 7, 7, -1]), [4, 0, 2, 3]))
    assert population.base is dataset
    assert population.ids(np.arange(4)).tolist() == [19, 5, 7, 7]
    assert population.ids(np.array([-1, 0])).tolist() == [7, 19]
    sizes = dataset.source.sizes
    assert population.sizes(sizes).tolist() == sizes[[5, 7, 19]].tolist()
    with pytest.raises(ConfigError, match="from 0 to 4"):
        population.ids(np.array([0, 4]))


def test_labels_tell_subsets_apart() -> None:
    labels = {DatasetPopulation(Subset(base(), part)).label for part in ([1, 2], [2, 1], range(20))}
    assert len(labels) == 3 and "" not in labels
    assert DatasetPopulation(Subset(base(), [1, 2])).label in labels
