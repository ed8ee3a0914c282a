"""The Loader with the prefetch process before slow storage."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import processes_of
from support.ranks import run_ranks
from support.waiting import await_true, until
from torch import distributed

from stoker import Cache
from stoker.epoch.setup import CacheSetup
from stoker.errors import CapacityError
from stoker.prefetch.walk import Progress
from stoker.pytorch import Loader, SampleDataset
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

NUM = 600
SAMPLES = [np.full(100 + i % 50, i, np.int32).tobytes() for i in range(NUM)]


def number_of(data: Any) -> int:
    """The sample's number, after a look at every byte of it."""
    values = np.frombuffer(data, np.int32)
    assert (values == values[0]).all()
    return int(values[0])


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))


def slow_dataset(latency: float = 0.002) -> SampleDataset:
    return SampleDataset(SlowSource(MemorySource(SAMPLES), latency=latency), number_of)


def prefetchers() -> list[int]:
    """The prefetch processes of this test."""
    return processes_of("stoker.prefetch.process", Path(os.environ["STOKER_RUNTIME_DIR"]))


def new_prefetchers(known: set[int]) -> set[int]:
    """The prefetch processes that are not of ``known``, once there are any."""
    found: set[int] = set()
    until(lambda: found.update(set(prefetchers()) - known) or found)
    return found


@pytest.mark.parametrize("recipe", ["minio", "lru", "belady"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_access_once_and_each_read_counted(recipe: str, num_workers: int) -> None:
    dataset = slow_dataset()
    with Loader(
        dataset, batch_size=16, cache="20%", recipe=recipe, num_workers=num_workers, epochs=3
    ) as loader:
        for _ in range(3):
            seen = np.concatenate([batch.numpy() for batch in loader])
            assert sorted(seen.tolist()) == list(range(NUM))
        assert loader._session.controller.opened.ahead is not None
        stats = loader.stats
        reads = int(dataset.source.reads.sum())
    assert stats.accesses == 3 * NUM == stats.hits + stats.fetched
    assert reads == stats.fetched
    if recipe != "lru":
        later = loader.epoch_stats[1:]
        assert all(abs(epoch.byte_hit_ratio - 0.2) < 0.03 for epoch in later)


class WatchedSource(SlowSource):
    """Notes how many requests are under way at once, at most, and which processes read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most = SharedArray.create(1, np.int64)
        self.by_others = SharedArray.create(1, np.int64)
        self._own, self._under_way, self._mutex = os.getpid(), 0, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mutex": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _mutex=threading.Lock())

    def read_packed(self, ids: Any) -> Any:
        with self._mutex:
            self._under_way += len(ids)
            self.most.array[0] = max(self.most.array[0], self._under_way)
            self.by_others.array[0] += len(ids) * (os.getpid() != self._own)
        try:
            return super().read_packed(ids)
        finally:
            with self._mutex:
                self._under_way -= len(ids)


def test_the_prefetch_process_comes_up_while_the_cache_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanwhile: list[bool] = []

    def opened(setup: CacheSetup, *arguments: Any, **options: Any) -> Any:
        meanwhile.append(await_true(prefetchers, 20))
        if len(meanwhile) == 1:
            raise CapacityError("not now")
        return open_cache(setup, *arguments, **options)

    open_cache = CacheSetup.open
    monkeypatch.setattr(CacheSetup, "open", opened)
    with Loader(slow_dataset(), batch_size=16) as loader:
        with pytest.raises(CapacityError, match="not now"):
            iter(loader)
        assert not prefetchers(), "it has ended"
        assert sum(len(batch) for batch in loader) == NUM
    assert meanwhile == [True, True]


def test_without_workers_many_samples_are_read_at_once() -> None:
    """Alone, this process would read a batch of 4 and then the next one."""
    source = WatchedSource(MemorySource(SAMPLES), latency=0.01)
    dataset = SampleDataset(source, number_of)
    with Loader(dataset, batch_size=4, cache="100%") as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        assert await_true(lambda: source.by_others.array[0] > 0, 60), "prefetch has begun"
        seen += [int(number) for batch in iterator for number in batch]
    assert sorted(seen) == list(range(NUM))
    assert source.most.array[0] >= 8
    assert loader.stats.fetched == source.reads.sum() == NUM


def test_a_batch_leaves_the_window_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no more workers decode at once than there are batches in the window."""
    log: list[str] = []
    finish = Progress.finish

    def finished(self: Progress, *accesses: int) -> None:
        log.append("copied")
        finish(self, *accesses)

    def decoded(data: Any) -> int:
        log.append("decoded")
        return number_of(data)

    monkeypatch.setattr(Progress, "finish", finished)
    dataset = SampleDataset(SlowSource(MemorySource(SAMPLES), latency=0), decoded)
    with Loader(dataset, batch_size=50, cache="20%") as loader:
        assert len(next(iter(loader))) == 50
    assert log[:51] == ["copied"] + ["decoded"] * 50


def walk(rank: int, latency: float) -> dict[str, Any]:
    dataset = slow_dataset(latency)
    with Loader(
        dataset,
        batch_size=8,
        cache="30%",
        recipe="lru",
        num_workers=2,
        epochs=2,
        multiprocessing_context="fork",
    ) as loader:
        seen = [np.concatenate([b.numpy() for b in loader]).tolist() for _ in range(2)]
        distributed.barrier()  # neither rank, nor the process of both, has anything left to read
        found = {
            "seen": seen,
            "fetched": loader.stats.fetched,
            "accesses": loader.stats.accesses,
            "reads": dataset.source.reads.copy(),  # type: ignore[attr-defined]
            "prefetchers": prefetchers(),
        }
        distributed.barrier()
        return found


def test_two_ranks_share_a_prefetcher_and_read_nothing_twice(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, walk, 0.002)
    for epoch in range(2):
        both = [number for result in ranks for number in result["seen"][epoch]]
        assert sorted(both) == list(range(NUM))
    assert sum(result["accesses"] for result in ranks) == 2 * NUM
    assert ranks[0]["prefetchers"] == ranks[1]["prefetchers"]
    assert len(ranks[0]["prefetchers"]) == 1
    reads = ranks[0]["reads"] + ranks[1]["reads"]
    assert reads.min() >= 1
    assert reads.max() <= 2, "once for an access at most"
    assert reads.sum() == sum(result["fetched"] for result in ranks)


def test_killed_again_and_again_the_epoch_goes_on() -> None:
    killed: set[int] = set()
    with Loader(slow_dataset(), batch_size=8, cache="30%", epochs=2) as loader:
        for _ in range(2):
            seen = []
            for step, batch in enumerate(loader):
                seen += batch.tolist()
                if step in (10, 40):
                    for pid in new_prefetchers(killed):
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
            assert sorted(seen) == list(range(NUM))
    assert len(killed) >= 4


def test_switched_off() -> None:
    with Loader(slow_dataset(0), batch_size=16, cache=Cache("20%", prefetch=0)) as loader:
        assert sum(len(batch) for batch in loader) == NUM
        assert loader._session.controller.opened.ahead is None
        assert not prefetchers()


def test_an_abandoned_epoch_and_a_jump() -> None:
    with Loader(slow_dataset(), batch_size=16, cache="20%") as loader:
        for step, _ in enumerate(loader):
            if step == 5:
                break
        loader.set_epoch(7)
        seen = np.concatenate([batch.numpy() for batch in loader])
        assert sorted(seen.tolist()) == list(range(NUM))


def test_drop_last_does_not_hold_the_next_epoch_up() -> None:
    with Loader(slow_dataset(), batch_size=64, cache="20%", drop_last=True) as loader:
        for _ in range(3):
            assert sum(len(batch) for batch in loader) == NUM - NUM % 64
