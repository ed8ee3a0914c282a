"""SlowSource: it changes nothing but the time, and what processes share is shared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from stoker.errors import ConfigError, SourceUnavailable
from stoker.source import MemorySource, Source
from stoker.testing import SlowSource, SourceConformance
from stoker.testing.sources import _makespan, _normal

METHODS = ("fork", "spawn", "forkserver")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class TestSlowSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return SlowSource(MemorySource(samples), latency=0.0002, bandwidth=1e9, iops=1e6)


def make(samples: int = 100, size: int = 1000, **how: object) -> SlowSource:
    return SlowSource(MemorySource([bytes(size)] * samples), **how)


def seconds(source: SlowSource, ids: object) -> float:
    begin = time.monotonic()
    source.read_packed(ids)
    return time.monotonic() - begin


def read_often(source: SlowSource, times: int) -> None:
    for _ in range(times):
        source.read_packed(range(10))


def read_for_ever(source: SlowSource) -> None:
    while True:
        source.read_packed([0])


@pytest.mark.parametrize("method", METHODS)
def test_reads_are_counted_over_processes(method: str) -> None:
    source = make(latency=0)
    children = [
        multiprocessing.get_context(method).Process(target=read_often, args=(source, 50))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    source.read([0, 0, 99])
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert source.reads.tolist() == [152, *[150] * 9, *[0] * 89, 1]
    with pytest.raises(ValueError, match="read-only"):
        source.reads[0] = 0
    source.reset_reads()
    assert not source.reads.any()


def test_a_batch_takes_its_latency_in_waves() -> None:
    source = make(latency=0.02, tail=0, concurrency=5)
    assert 0.02 <= seconds(source, [1]) < 1
    assert 0.04 <= seconds(source, range(10)) < 1
    assert 0.2 <= seconds(source, range(50)) < 1


def test_bandwidth_and_iops_are_limits() -> None:
    assert seconds(make(latency=0, bandwidth=1e6), range(100)) >= 0.1
    assert seconds(make(latency=0, iops=1000), range(100)) >= 0.1


def test_a_failing_read_takes_its_time_too() -> None:
    class Broken(MemorySource):
        def read_packed(self, ids: object) -> tuple[np.ndarray, np.ndarray, dict]:
            raise SourceUnavailable("down")

    source = SlowSource(Broken([b"x"]), latency=0.03, tail=0)
    begin = time.monotonic()
    with pytest.raises(SourceUnavailable):
        source.read([0])
    assert time.monotonic() - begin >= 0.03


def test_limits_are_shared_over_processes() -> None:
    source = make(latency=0, iops=500)
    begin = time.monotonic()
    children = [
        multiprocessing.get_context("fork").Process(target=read_often, args=(source, 5))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert time.monotonic() - begin >= 100 / 500


def test_a_killed_reader_leaves_nothing_locked() -> None:
    source = make(latency=0)
    for _ in range(10):
        child = multiprocessing.get_context("fork").Process(target=read_for_ever, args=(source,))
        child.start()
        until(lambda: source.reads[0])
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert seconds(source, [1]) < 1
        source.reset_reads()


def test_latencies_depend_on_seed_sample_and_turn_only() -> None:
    ids = np.arange(20_000, dtype=np.uint32)
    zero = np.zeros(len(ids), np.int64)
    first = _normal(1, ids, zero)
    assert np.array_equal(_normal(1, ids[::-1], zero)[::-1], first)
    for other in (_normal(2, ids, zero), _normal(1, ids, zero + 1), _normal(-1, ids, zero)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.03
    assert np.isfinite(first).all()
    assert abs(first.mean()) < 0.03
    assert abs(first.std() - 1) < 0.03
    assert abs((first > 2.326).mean() - 0.01) < 0.003


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 8))
def test_makespan_lies_between_its_bounds(latencies: list[float], lanes: int) -> None:
    span = _makespan(np.array(latencies), lanes)
    longest, total = max(latencies, default=0), sum(latencies)
    assert max(longest, total / lanes) <= span * (1 + 1e-9) + 1e-9
    assert span <= (total / lanes + longest) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    "bad",
    [
        {"latency": -1},
        {"latency": float("nan")},
        {"tail": float("inf")},
        {"bandwidth": 0},
        {"iops": -3},
        {"concurrency": 0},
    ],
)
def test_impossible_storage_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
        make(**bad)
