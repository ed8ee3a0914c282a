"""The prefetch process killed and stopped under a training loop with workers."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.waiting import await_true, train_step

from stoker.node import supervisor
from stoker.pytorch import Loader, SampleDataset
from stoker.shared import SharedArray
from stoker.source.base import PackedRead, Source
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

from .processes import prefetchers, signal_all, wait_for_prefetcher
from .samples import number_of, sample, served, walk

NUM = 240
BATCH = 8
_COMMAND = Path("/proc/self/cmdline")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def slow_dataset(latency: float = 0.01) -> SampleDataset:
    samples = MemorySource([sample(number) for number in range(NUM)])
    return SampleDataset(SlowSource(samples, latency=latency), number_of)


def complaints(caplog: pytest.LogCaptureFixture) -> int:
    return sum("died or hung" in record.message for record in caplog.records)


def test_killed_every_two_seconds(soak: float, caplog: pytest.LogCaptureFixture) -> None:
    stop, killed = threading.Event(), []

    def kill() -> None:
        while not stop.wait(2.0):
            killed.extend(found := prefetchers())
            signal_all(found, signal.SIGKILL)

    step = max(7.0, soak) / (NUM / BATCH)
    killer = threading.Thread(target=kill)
    with (
        caplog.at_level(logging.WARNING, "stoker"),
        Loader(slow_dataset(), BATCH, cache="30%", num_workers=2, return_meta=True) as loader,
    ):
        killer.start()
        try:
            seen = []
            for batch in loader:
                seen += served(batch)
                train_step(step)
        finally:
            stop.set()
            killer.join()
        assert sorted(seen) == list(range(NUM))
        # Afterwards all is well: the cache is whole, and another epoch gives each sample.
        assert walk(loader) == list(range(NUM))
        assert loader.stats.accesses == 2 * NUM
    assert len(killed) >= 2
    assert complaints(caplog) == 1


class StoppingSource(SlowSource):
    """Storage in a read of which the prefetch process stops, once that is wanted."""

    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(source, **how)
        self._is_due = SharedArray.create(1, np.uint8, "due")
        self._stopped = SharedArray.create(1, np.int64, "stopped")

    def stop_next(self) -> None:
        self._is_due.array[0] = 1

    @property
    def stopped(self) -> int:
        """The process that stopped; 0 if none has."""
        return int(self._stopped.array[0])

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        if self._is_due.array[0] and b"stoker.prefetch.process" in _COMMAND.read_bytes():
            self._is_due.array[0] = 0
            self._stopped.array[0] = os.getpid()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().read_packed(ids)


def test_one_that_stops_in_a_read_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers get what it has claimed, and the epoch ends although it never goes on."""
    heard: list[int] = []  # the silence begins with a process's first sign of life

    def hear(message: dict[str, Any]) -> int:
        heard.append(pid_here(message))
        return heard[-1]

    pid_here = supervisor._pid_here
    monkeypatch.setattr(supervisor, "_pid_here", hear)
    source = StoppingSource(MemorySource([sample(n) for n in range(NUM)]), latency=0.01)
    dataset = SampleDataset(source, number_of)
    with (
        caplog.at_level(logging.WARNING, "stoker"),
        Loader(dataset, BATCH, cache="30%", num_workers=2, return_meta=True) as loader,
    ):
        batches = iter(loader)
        seen = served(next(batches))
        assert await_true(lambda: heard)
        source.stop_next()
        while not await_true(lambda: source.stopped, 1):  # it may wait for room
            seen += served(next(batches))
        stopped = source.stopped
        for batch in batches:
            seen += served(batch)
        assert sorted(seen) == list(range(NUM))
        assert loader.stats.accesses == NUM
        assert await_true(lambda: stopped not in prefetchers()), "it is still there"
        assert wait_for_prefetcher() != stopped  # another one works
        assert walk(loader) == list(range(NUM))
    assert complaints(caplog) == 1
