"""The oracle recipe: everything is in the cache before the first access, and nothing is counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.images import NUM_IMAGES
from support.parts import ids_in, images, number_of, numbers
from torch.utils.data import Subset

from stoker import Cache
from stoker.errors import SourceUnavailable
from stoker.pytorch import Loader, SampleDataset, with_cache
from stoker.testing import FaultySource, SlowSource

NUM = 100


def slow() -> SampleDataset:
    return SampleDataset(SlowSource(numbers(NUM), latency=0.001), number_of)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [None, False])
def test_every_access_hits_and_each_sample_is_read_once(
    num_workers: int, shuffle: bool | None
) -> None:
    dataset = slow()
    with Loader(
        dataset, 8, shuffle, cache="5%", recipe="oracle", num_workers=num_workers
    ) as loader:
        for _ in range(2):
            assert sorted(i for batch in loader for i in batch.tolist()) == list(range(NUM))
        stats = loader.stats
    assert (stats.accesses, stats.hits, stats.fetched) == (2 * NUM, 2 * NUM, 0)
    assert stats.bytes_from_source == 0
    assert dataset.source.reads.tolist() == [1] * NUM


def test_whatever_the_cache_is_set_to() -> None:
    for cache in (0, 1, "100%"):
        with Loader(slow(), 8, cache=cache, recipe="oracle") as loader:
            assert sum(len(batch) for batch in loader) == loader.stats.hits == NUM


def test_a_subset_preloads_its_samples_only() -> None:
    dataset = slow()
    with Loader(Subset(dataset, range(10, 30)), 4, recipe="oracle") as loader:
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(10, 30))
        assert loader.stats.hits == 20
    assert dataset.source.reads.sum() == 20


def test_decoded_samples_cost_no_reads_either(image_root: Path) -> None:
    with Loader(images(image_root), 8, cache=Cache(0, stage="decoded"), recipe="oracle") as loader:
        assert sorted(i for x, _ in loader for i in ids_in(x)) == list(range(NUM_IMAGES))
        assert (loader.stats.hits, loader.stats.bytes_from_source) == (NUM_IMAGES, 0)


def test_what_is_on_disk_is_not_read_again(tmp_path: Path) -> None:
    for reads in (NUM, 0):
        dataset = slow()
        with Loader(dataset, 8, recipe="oracle", cache=Cache(disk=tmp_path / "disk")) as loader:
            assert sum(len(batch) for batch in loader) == loader.stats.hits == NUM
        assert dataset.source.reads.sum() == reads


def test_without_a_loader() -> None:
    dataset = slow()
    cached = with_cache(dataset, recipe="oracle")
    assert cached[7] == 7
    assert cached.store.stats()["hits"] == 1
    cached.close()
    assert dataset.source.reads.tolist() == [1] * NUM


def test_the_log_says_how_it_went(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.store.fill._SAY_EVERY", 0.0)
    with caplog.at_level(logging.INFO, "stoker"), Loader(slow(), 8, recipe="oracle") as loader:
        next(iter(loader))
    assert "preloading: 64 of 100" in caplog.text or "preloading: 36 of 100" in caplog.text
    assert "preloaded 100 samples" in caplog.text
    assert "hit ratio from the second epoch on: 100.0%" in caplog.text


def test_an_outage_while_preloading_is_told_and_a_bad_sample_left_to_its_access() -> None:
    down = SampleDataset(FaultySource(numbers(NUM), always={3: "unavailable"}), number_of)
    loader = Loader(down, 8, recipe="oracle")
    with pytest.raises(SourceUnavailable):
        iter(loader)
    gone = SampleDataset(FaultySource(numbers(NUM), always={3: "not_found"}), number_of)
    with Loader(gone, 8, recipe="oracle", on_error="skip") as loader:
        assert sum(len(batch) for batch in loader) == NUM
        assert [failure.id for failure in loader.quarantine] == [3]
