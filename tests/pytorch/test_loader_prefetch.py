"""The Loader with the prefetch process before slow storage."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from companions import processes_of

from pytorch.ranks import run_ranks
from stoker.pytorch import Loader, SampleDataset
from stoker.source.memory import MemorySource
from stoker.testing.slow_source import SlowSource

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
        assert loader._engine.ahead is not None
        stats = loader.stats
        reads = int(dataset.source.reads.sum())
    assert stats.accesses == 3 * NUM == stats.hits + stats.fetched
    assert reads == stats.fetched
    if recipe != "lru":
        later = loader.epoch_stats[1:]
        assert all(abs(epoch.byte_hit_ratio - 0.2) < 0.03 for epoch in later)


def test_without_workers_it_is_much_faster_than_one_read_after_another() -> None:
    dataset = slow_dataset(latency=0.01)
    with Loader(dataset, batch_size=4, cache="100%", epochs=1) as loader:
        begin = time.perf_counter()
        count = sum(len(batch) for batch in loader)
        seconds = time.perf_counter() - begin
        assert count == NUM
    # Alone, this process reads a batch of 4 at once: 150 times 10 ms or more.
    print(f"{seconds:.2f} s against {NUM / 4 * 0.01:.2f} s")
    assert loader.stats.fetched == NUM


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
        stats = loader.stats
        return {
            "seen": seen,
            "fetched": stats.fetched,
            "accesses": stats.accesses,
            "reads": int(dataset.source.reads.sum()),
            "prefetchers": len(prefetchers()),
            "waited": [epoch.stall_seconds for epoch in loader.epoch_stats],
        }


def test_two_ranks_share_a_prefetcher_and_read_nothing_twice(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, walk, 0.002)
    for epoch in range(2):
        both = [number for result in ranks for number in result["seen"][epoch]]
        assert sorted(both) == list(range(NUM))
    assert sum(result["accesses"] for result in ranks) == 2 * NUM
    assert max(result["prefetchers"] for result in ranks) == 1


def test_killed_again_and_again_the_epoch_goes_on() -> None:
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.7):
            for pid in prefetchers():
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with Loader(
            slow_dataset(0.02), batch_size=8, cache="30%", epochs=2, num_workers=0
        ) as loader:
            for _ in range(2):
                seen = np.concatenate([batch.numpy() for batch in loader])
                assert sorted(seen.tolist()) == list(range(NUM))
    finally:
        stop.set()
        killer.join()


def test_switched_off() -> None:
    with Loader(slow_dataset(0), batch_size=16, cache="20%", prefetch_bytes=0) as loader:
        assert sum(len(batch) for batch in loader) == NUM
        assert loader._engine.ahead is None
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
