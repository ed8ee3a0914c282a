"""What training tells of itself between epochs, and what is said when it tells nothing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers

from stoker import recipes
from stoker.errors import ConfigError
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes.base import part
from stoker.sim.signals import MadeUpGraph

NUM = 40


def loader_of(recipe: Any, **options: Any) -> Loader:
    dataset = SampleDataset(numbers(NUM), number_of)
    return Loader(dataset, batch_size=8, cache="40%", recipe=recipe, **options)


def train(loader: Loader, accuracies: list[Any]) -> None:
    for accuracy in accuracies:
        for batch in loader:
            loader.observe(torch.ones(len(batch)))
        loader.end_epoch(accuracy=accuracy)


def elastic() -> Any:
    return replace(recipes.spidercache(), scorer=part(MadeUpGraph, degree=4))


def test_s9_shade_without_accuracy_says_once_what_to_call() -> None:
    with loader_of("shade") as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(loader, [None] * 4)
    (said,) = caught
    assert said.category is RuntimeWarning
    assert "loader.end_epoch(accuracy=...)" in str(said.message)
    assert "repeated by the factor 1" in str(said.message)
    assert said.filename == __file__, "it points at the loop"


@pytest.mark.parametrize(
    ("recipe", "accuracies"),
    [
        ("shade", [0.1, 0.2, None, 0.3]),
        (recipes.shade(repetition=3), [None] * 3),
        (recipes.shade(low=2, high=2), [None] * 3),
        ("base_cis", [None] * 3),
    ],
)
def test_s9_nothing_is_said_where_nothing_is_missing(recipe: Any, accuracies: list[Any]) -> None:
    with loader_of(recipe) as loader:
        train(loader, accuracies)  # warnings are errors


def test_s9_an_elastic_split_asks_for_the_number_of_epochs() -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"stays at 0\.9\. Give the Loader epochs=") as caught,
        loader_of(elastic()),
    ):
        pass
    assert [warning.filename for warning in caught] == [__file__]


def test_s9_an_elastic_split_asks_for_accuracy() -> None:
    with (
        loader_of(elastic(), epochs=3) as loader,
        pytest.warns(RuntimeWarning, match="same pace.*end_epoch"),
    ):
        train(loader, [None] * 3)


@pytest.mark.parametrize("wrong", [93.1, -0.1, float("nan"), float("inf"), 1.0001])
def test_s9_accuracy_is_a_share(wrong: float) -> None:
    with loader_of("shade") as loader:
        for _ in loader:
            pass
        with pytest.raises(ConfigError, match="give a share from 0 to 1"):
            loader.end_epoch(accuracy=wrong)
        loader.end_epoch(accuracy=np.float32(0.5))
        assert np.isfinite(loader.scores.accuracies).sum() == 0  # until the next epoch begins


def test_s9_per_cent_is_told_as_such() -> None:
    with loader_of("minio") as loader:
        for _ in loader:
            pass
        with pytest.raises(ConfigError, match=r"accuracy=93\.1 .* per cent, give 0\.931"):
            loader.end_epoch(accuracy=torch.tensor(93.1))
