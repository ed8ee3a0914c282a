"""The prefetch process killed and stopped under a training loop with workers."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import numpy as np
import pytest

from stoker.pytorch import Loader, SampleDataset
from stoker.source.memory import MemorySource
from stoker.testing.slow_source import SlowSource

from .processes import prefetchers, signal_all, wait_for_prefetcher
from .samples import number_of, sample, served, walk

NUM = 240
BATCH = 8
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
                time.sleep(step)  # the computation
        finally:
            stop.set()
            killer.join()
        assert sorted(seen) == list(range(NUM))
        # Afterwards all is well: the cache is whole, and another epoch gives each sample.
        assert walk(loader) == list(range(NUM))
        assert loader.stats.accesses == 2 * NUM
    assert len(killed) >= 2
    assert complaints(caplog) == 1


def test_stopped_for_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Its reads under way are the workers' soon; none of them waits for the stopped process."""
    stopped: list[int] = []
    steps: list[float] = []
    with (
        caplog.at_level(logging.WARNING, "stoker"),
        Loader(slow_dataset(), BATCH, cache="30%", num_workers=2, return_meta=True) as loader,
    ):
        seen = []
        begin = last = time.monotonic()
        awake = threading.Timer(13.0, lambda: signal_all(stopped, signal.SIGCONT))
        awake.start()
        try:
            for batch in loader:
                steps.append(time.monotonic() - last)
                seen += served(batch)
                time.sleep(0.4)
                if not stopped and prefetchers() and time.monotonic() - begin > 3.0:
                    stopped.append(wait_for_prefetcher())  # it has said that it is alive
                    os.kill(stopped[0], signal.SIGSTOP)
                last = time.monotonic()
        finally:
            awake.cancel()
        assert stopped
        assert sorted(seen) == list(range(NUM))
        assert stopped[0] not in prefetchers()
        wait_for_prefetcher()  # another one works
        assert loader.stats.accesses == NUM
    assert max(steps[1:]) < 5.0
    assert float(np.median(steps)) < 0.1
    assert complaints(caplog) == 1
