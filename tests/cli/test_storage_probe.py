"""The measurement of `stoker doctor` on storage whose limits are known."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from stoker.cli._storage import CONCURRENCIES, probe
from stoker.errors import SampleNotFound
from stoker.source import MemorySource
from stoker.source.base import BaseSource
from stoker.source.packed import Offsets
from stoker.testing import FaultySource, SlowSource

SIZE = 1000


def samples(count: int) -> MemorySource:
    return MemorySource((np.zeros(count * SIZE, np.uint8), np.arange(count + 1) * SIZE))


class MeteredStorage(BaseSource):
    """Storage of ``latency`` seconds a read and ``iops`` reads a second, on a clock of its own.

    The clock moves when each lane of the probe has a read under way, and all of these then end.
    A lane too few or too many breaks the barrier, and with it the test.
    """

    def __init__(self, source: MemorySource, latency: float, iops: int) -> None:
        self.now = 0.0
        self._source, self._latency, self._iops = source, latency, iops
        self._lanes = iter((1, *CONCURRENCIES))  # one read comes first
        self._threads: dict[threading.Thread, threading.Barrier] = {}
        self._free_places = 0
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> Offsets:
        return self._source.sizes

    def read(self, ids: ArrayLike) -> list[bytes]:
        self._barrier_of(threading.current_thread()).wait(60)
        return self._source.read(ids)

    def _barrier_of(self, thread: threading.Thread) -> threading.Barrier:
        with self._mutex:
            if thread not in self._threads:
                if not self._free_places:
                    self._free_places = lanes = next(self._lanes)
                    self._step = threading.Barrier(lanes, lambda: self._pass(lanes))
                self._free_places -= 1
                self._threads[thread] = self._step
            return self._threads[thread]

    def _pass(self, lanes: int) -> None:
        self.now += max(self._latency, lanes / self._iops)


def test_latency_and_the_shared_limit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MeteredStorage(samples(4000), latency=1 / 128, iops=512)
    clock = SimpleNamespace(perf_counter=lambda: source.now)
    monkeypatch.setattr("stoker.cli._storage.time", clock)
    found = probe(source, seconds=4, most_bytes=1 << 30)
    assert source.now == 4 + 1 / 128  # and the read that comes first
    assert [step.concurrency for step in found.steps] == list(CONCURRENCIES)
    assert found.latency == dict.fromkeys(("p50", "p90", "p99", "max"), 1 / 128)
    assert [step.reads_per_second for step in found.steps] == [128, 256, *[512] * 5]
    assert found.best.reads_per_second == 512
    assert found.best.bytes_per_second == 512 * SIZE


def test_no_sample_is_read_twice_and_bytes_are_bounded() -> None:
    source = SlowSource(samples(3000), latency=0.0005, tail=0.0)
    found = probe(source, seconds=3, most_bytes=500 * SIZE)
    assert source.reads.max() == 1
    assert 100 < source.reads.sum() <= 500
    assert sum(step.reads for step in found.steps) == source.reads.sum() - 1  # and one to begin
    assert 0 < len(found.kept) <= 64


@pytest.mark.parametrize("count", [1, 2, 30])
def test_few_samples_give_fewer_steps(count: int) -> None:
    source = SlowSource(samples(count), latency=0.001)
    found = probe(source, seconds=1, most_bytes=1 << 30)
    assert found.steps[0].concurrency == 1 and found.latency["p50"] > 0
    assert len(found.steps) < len(CONCURRENCIES)
    if count > 1:
        assert source.reads.max() == 1


def test_storage_that_is_slower_than_the_time_given_still_gives_a_number() -> None:
    found = probe(SlowSource(samples(300), latency=0.3), seconds=0.5, most_bytes=1 << 30)
    assert found.steps[0].reads >= 1


def test_errors_are_those_of_the_source() -> None:
    source = FaultySource(samples(40), rates={"not_found": 1.0})
    with pytest.raises(SampleNotFound):
        probe(source, seconds=1, most_bytes=1 << 30)
