"""The measurement of `stoker doctor` on storage whose limits are known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from stoker.cli._storage_probe import CONCURRENCIES, probe
from stoker.errors import SampleNotFound
from stoker.source import MemorySource
from stoker.testing import FaultySource, SlowSource

SIZE = 1000


def samples(count: int) -> MemorySource:
    return MemorySource((np.zeros(count * SIZE, np.uint8), np.arange(count + 1) * SIZE))


def test_latency_and_the_shared_limit_are_found() -> None:
    source = SlowSource(samples(4000), latency=0.01, tail=0.0, iops=400)
    begin = time.perf_counter()
    found = probe(source, seconds=4, most_bytes=1 << 30)
    assert time.perf_counter() - begin < 7
    assert [step.concurrency for step in found.steps] == list(CONCURRENCIES)
    assert 0.009 < found.latency["p50"] < 0.03
    assert found.latency["p50"] <= found.latency["p99"] <= found.latency["max"]
    one, two = found.steps[:2]
    assert 40 < one.reads_per_second <= 101
    assert two.reads_per_second > 1.3 * one.reads_per_second
    assert found.best.reads_per_second == pytest.approx(400, rel=0.2)
    assert found.best.bytes_per_second == pytest.approx(400 * SIZE, rel=0.2)


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
