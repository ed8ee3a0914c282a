"""MemorySource: the conformance tests, packed input, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.source import MemorySource, Source
from stoker.testing import SourceConformance


class TestMemorySource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        return MemorySource(samples)


class TestPackedMemorySource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        offsets = np.cumsum([0, *map(len, samples)])
        return MemorySource((np.frombuffer(b"".join(samples), np.uint8), offsets))


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20), st.data())
def test_reads_back_what_it_was_given(samples: list[bytes], data: st.DataObject) -> None:
    source = MemorySource(samples)
    ids = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=30))
    assert source.read(ids) == [samples[i] for i in ids]
    assert source.sizes.tolist() == [len(sample) for sample in samples]


def test_both_forms_have_one_fingerprint() -> None:
    packed = MemorySource((np.frombuffer(b"abc", np.uint8), np.array([0, 1, 3])))
    assert packed.fingerprint == MemorySource([b"a", b"bc"]).fingerprint
    assert packed.fingerprint != MemorySource([b"ab", b"c"]).fingerprint


def test_bytes_like_samples_are_accepted() -> None:
    source = MemorySource([bytearray(b"ab"), memoryview(b"c"), b""])
    assert source.read([0, 1, 2]) == [b"ab", b"c", b""]


def test_no_samples_are_refused() -> None:
    for nothing in ([], (np.empty(0, np.uint8), np.zeros(1, np.int64))):
        with pytest.raises(ConfigError, match="at least one sample"):
            MemorySource(nothing)


@pytest.mark.parametrize("offsets", ([], [0], [1, 3], [0, 2], [0, 4], [0, 3, 2, 3], [[0, 3]]))
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ConfigError, match="offsets"):
        MemorySource((np.zeros(3, np.uint8), np.array(offsets, np.int64)))
