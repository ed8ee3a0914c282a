"""The Loader before files in the page cache: workers read past the cache, and come back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.processes import processes_of

from stoker import Cache
from stoker.epoch import read_ahead
from stoker.pytorch import Loader, SampleDataset
from stoker.source.files import FileSource
from stoker.types import Outcome

NUM = 400


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleDataset:
    """Files that hold their numbers, at hand whatever the kernel does with the page cache."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(FileSource, "at_hand", lambda self, ids: 1.0)
    paths = [tmp_path / f"{number}.bin" for number in range(NUM)]
    for number, path in enumerate(paths):
        path.write_bytes(number.to_bytes(4, "little") * 10)
    return SampleDataset(FileSource(paths), lambda data: int.from_bytes(data[:4], "little"))


def numbers(loader: Loader) -> list[int]:
    return torch.cat(list(loader)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_past_the_cache(files: SampleDataset, workers: int) -> None:
    with Loader(files, 16, num_workers=workers, epochs=2) as loader:
        epochs = [numbers(loader) for _ in range(2)]
        assert all(sorted(epoch) == list(range(NUM)) for epoch in epochs)
        stats = loader.stats
        assert stats.direct == stats.fetched == stats.accesses == 2 * NUM
        assert stats.cache_bytes == stats.hits == 0
        assert f"({2 * NUM} direct, from the page cache)" in stats.summary
        assert [epoch.direct for epoch in loader.epoch_stats] == [NUM, NUM]
        assert processes_of("stoker.prefetch.process", Path(os.environ["STOKER_RUNTIME_DIR"])) == []


def test_the_order_is_that_of_the_plan(files: SampleDataset) -> None:
    with Loader(files, 16) as aside, Loader(files, 16, cache=Cache(stands_aside=False)) as through:
        assert numbers(aside) == numbers(through)
        assert through.stats.direct == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_it_comes_back_within_an_epoch_when_storage_slows_down(
    files: SampleDataset, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_INTERVAL", 0.0)
    with Loader(files, 16, num_workers=workers, epochs=3, cache="50%", return_meta=True) as loader:
        seen, outcomes = [], []
        for number, (batch, meta) in enumerate(loader):
            seen += batch.tolist()
            outcomes += meta.outcomes.tolist()
            if number == 5:
                monkeypatch.setattr(FileSource, "at_hand", lambda self, ids: 0.0)
        assert sorted(seen) == list(range(NUM))
        assert set(outcomes) == {Outcome.FETCHED}
        first = loader.stats
        assert 6 * 16 <= first.direct < NUM
        assert first.cache_bytes > 0
        later = torch.cat([batch for batch, _ in loader])
        assert sorted(later.tolist()) == list(range(NUM))
        assert loader.epoch_stats[1].direct == 0 < loader.epoch_stats[1].hits
        monkeypatch.setattr(FileSource, "at_hand", lambda self, ids: 1.0)
        assert sorted(torch.cat([b for b, _ in loader]).tolist()) == list(range(NUM))
        assert loader.epoch_stats[2].direct == NUM


def test_a_resumed_epoch_gives_the_rest(files: SampleDataset) -> None:
    with Loader(files, 16, epochs=2) as loader:
        batches = iter(loader)
        seen = [number for _ in range(7) for number in next(batches).tolist()]
        state = loader.state_dict()
    with Loader(files, 16, epochs=2) as loader:
        loader.load_state_dict(state)
        seen += numbers(loader)
        assert sorted(seen) == list(range(NUM))
        assert loader.stats.direct >= NUM


def test_what_has_a_use_for_the_cache_does_not_stand_aside(
    files: SampleDataset, tmp_path: Path
) -> None:
    for cache, recipe in (
        (Cache(stands_aside=False), "foresight"),
        (Cache(stage="decoded"), "foresight"),
        (Cache(disk=tmp_path / "disk"), "foresight"),
        (Cache(), "icache"),
    ):
        with Loader(files, 16, cache=cache, recipe=recipe) as loader:
            assert len(numbers(loader)) == NUM
            assert loader.stats.direct == 0
    assert np.isfinite(loader.stats.ess)
