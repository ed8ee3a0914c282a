"""The cache without a Loader: in torch's own, in torchdata's, in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import ids_in, images, number_of, numbers, with_noise
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from stoker import Cache
from stoker.errors import ConfigError, SampleCorrupt, SegmentError
from stoker.jobs import Sharing
from stoker.pytorch import CachedDataset, SampleDataset, with_cache
from stoker.source import MemorySource

# torchdata 0.11 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stage", ["encoded", "decoded"])
def test_in_the_loaders_of_others(image_root: Path, make: Any, workers: int, stage: str) -> None:
    dataset = with_cache(images(image_root), Cache("100%", stage=stage))
    loader = make(Subset(dataset, range(0, 60, 2)), batch_size=8, num_workers=workers)
    for _ in range(2):
        found = [i for batch, _ in loader for i in ids_in(batch)]
        assert found == list(range(0, 60, 2))
    stats = dataset.store.stats()
    assert (stats["fetched"], stats["hits"]) == (30, 30)
    dataset.close()


def test_in_workers_of_another_start_method(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "100%")
    loader = DataLoader(
        dataset,
        batch_size=8,
        num_workers=2,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    for _ in range(2):
        assert sorted(i for batch, _ in loader for i in ids_in(batch)) == list(range(60))
    assert dataset.store.stats()["hits"] == 60
    del loader
    dataset.close()


def test_stateful_data_loader_resumes_over_the_cache(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "100%")
    loader = StatefulDataLoader(dataset, batch_size=8, num_workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    expected = [ids_in(batch) for batch, _ in iterator]
    again = StatefulDataLoader(dataset, batch_size=8, num_workers=2)
    again.load_state_dict(state)
    assert [ids_in(batch) for batch, _ in again] == expected
    dataset.close()


def test_threads_share_it() -> None:
    dataset = with_cache(SampleDataset(numbers(200), number_of), "30%", recipe="lru")
    orders = [np.random.default_rng(seed).permutation(200) for seed in range(8)]

    def read(order: Any) -> bool:
        parts = [dataset.__getitems__(order[i : i + 20]) for i in range(0, 200, 20)]
        return [number for part in parts for number in part] == order.tolist()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, orders))
    assert dataset.store.stats()["accesses"] == 1600
    dataset.close()


def test_one_sample(image_root: Path) -> None:
    dataset = with_cache(images(image_root), "50%")
    assert len(dataset) == 60
    assert int(dataset[-1][0][0, 0, 0]) == 59
    with pytest.raises(IndexError, match="index 60"):
        dataset[60]
    dataset.close()
    with pytest.raises(SegmentError):
        dataset[0]


def test_transforms_come_after_the_cache(image_root: Path) -> None:
    for stage in ("encoded", "decoded"):
        dataset = with_cache(images(image_root, with_noise), Cache("100%", stage=stage))
        assert not torch.equal(dataset[5][0], dataset[5][0])
        dataset.close()


def test_what_cannot_be_decoded_is_named() -> None:
    dataset = with_cache(SampleDataset(MemorySource([b"00000000", b"?" * 8]), number_of), "100%")
    assert isinstance(dataset, CachedDataset)
    with pytest.raises(SampleCorrupt, match="sample 1"):
        dataset.__getitems__([0, 1])
    assert dataset.__getitems__([0, 0]) == [0, 0]
    dataset.close()


def test_two_caches_of_the_same_samples_are_one(image_root: Path) -> None:
    first, second = (with_cache(images(image_root), "100%") for _ in "ab")
    list(first.__getitems__(range(60)))
    list(second.__getitems__(range(60)))
    assert second.store.stats()["hits"] == 60
    with pytest.warns(RuntimeWarning, match="a running job's cache"):
        third = with_cache(images(image_root), "50%")
    decoded = with_cache(images(image_root), Cache("100%", stage="decoded"))
    list(decoded.__getitems__(range(60)))
    assert decoded.store.stats()["hits"] == 0
    for one in (first, second, third, decoded):
        one.close()


def test_it_refuses_what_the_loader_refuses(image_root: Path) -> None:
    with pytest.raises(ConfigError, match="120%"):
        with_cache(images(image_root), "120%")


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefetch", "1MiB"), ("fetchers", 2), ("locality", False), ("sharing", Sharing("mine"))],
)
def test_it_refuses_what_would_be_ignored(image_root: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* needs the Loader"):
        with_cache(images(image_root), Cache(**{name: value}))
