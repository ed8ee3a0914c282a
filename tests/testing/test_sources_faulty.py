"""FaultySource: every fault happens as often as asked, repeatably, and is counted."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceUnavailable
from stoker.source import MemorySource, Source
from stoker.source.packed import unpack
from stoker.testing import FaultySource, SourceConformance
from stoker.testing.sources import FAULTS

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SAMPLES = [bytes([i % 256]) * (10 + i % 7) for i in range(2000)]


class TestFaultySource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return FaultySource(MemorySource(samples))


def make(**how: object) -> FaultySource:
    return FaultySource(MemorySource(SAMPLES), **how)


def test_each_fault_is_done_to_the_sample_it_is_for() -> None:
    always = dict(enumerate(FAULTS))
    source = make(always=always, stall=0.05)
    begin = time.monotonic()
    data, offsets, errors = source.read_packed(range(8))
    assert time.monotonic() - begin >= 0.05
    kinds = {index: type(error) for index, error in errors.items()}
    assert kinds == {0: SourceUnavailable, 1: SampleNotFound, 2: SampleCorrupt}
    assert [errors[index].ids for index in range(3)] == [[0], [1], [2]]
    read = unpack(data, offsets)
    assert read[:3] == [b"", b"", b""]
    assert read[3] == SAMPLES[3][: len(SAMPLES[3]) // 2]
    different = np.frombuffer(read[4], np.uint8) ^ np.frombuffer(SAMPLES[4], np.uint8)
    assert np.unpackbits(different).sum() == 1
    assert read[5:] == SAMPLES[5:8]
    assert source.faults == dict.fromkeys(FAULTS, 1)


def test_rates_are_kept_and_can_be_repeated() -> None:
    rates = {"unavailable": 0.2, "flip": 0.05}
    outcomes = []
    for _ in range(2):
        source = make(rates=rates, seed=5)
        outcomes.append([sorted(source.read_packed(range(2000))[2]) for _ in range(2)])
        assert abs(source.faults["unavailable"] - 800) < 100
        assert abs(source.faults["flip"] - 200) < 60
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] != outcomes[0][1]
    other = make(rates=rates, seed=6)
    assert sorted(other.read_packed(range(2000))[2]) != outcomes[0][0]


def test_the_ways_to_read_agree_on_what_failed() -> None:
    source = make(always={3: "not_found", 5: "corrupt"})
    samples, errors = source.read_each([5, 2, 3])
    assert samples == [None, SAMPLES[2], None]
    assert sorted(errors) == [0, 2]
    with pytest.raises(SampleCorrupt, match="sample 5") as raised:
        source.read([5, 2, 3])
    assert raised.value.ids == [5, 3]
    assert source.read([2, 4]) == [SAMPLES[2], SAMPLES[4]]


def read_all(source: FaultySource) -> None:
    source.read_packed(range(2000))


def test_faults_are_counted_over_processes() -> None:
    source = make(rates={"corrupt": 0.1})
    child = multiprocessing.get_context("fork").Process(target=read_all, args=(source,))
    child.start()
    child.join()
    before = source.faults["corrupt"]
    assert before > 100
    read_all(source)
    assert source.faults["corrupt"] > before + 100
    assert (source.reads == 2).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rates": {"meteor": 0.1}}, "meteor"),
        ({"rates": {"flip": -0.1}}, "rates="),
        ({"rates": {"flip": 0.7, "stall": 0.7}}, "rates="),
        ({"always": {0: "meteor"}}, "meteor"),
        ({"always": {2000: "flip"}}, "2000"),
        ({"stall": -1}, "stall="),
        ({"latency": -1}, "latency="),
    ],
)
def test_impossible_faults_are_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**bad)
