"""BaseSource: what it makes of a source that has only four methods, also when reads fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.source import BaseSource
from stoker.source.base import check_ids
from stoker.source.packed import unpack


class Minimal(BaseSource):
    """Samples ``b"0"``, ``b"1"``, ...; some are broken, and it may say which."""

    fingerprint = "minimal"

    def __init__(self, broken: set[int] = frozenset(), says_which: bool = True) -> None:
        self.sizes = np.ones(10, np.int64)
        self.broken, self.says_which = broken, says_which
        self.error: type[SourceError] = SampleCorrupt
        self.calls = 0

    def __len__(self) -> int:
        return 10

    def read(self, ids: np.ndarray) -> list[bytes]:
        self.calls += 1
        failed = [int(i) for i in ids if i in self.broken]
        if failed and self.says_which:
            raise self.error("broken", failed)
        if failed:
            raise self.error("broken")
        return [b"%d" % i for i in ids]


@given(st.sets(st.integers(0, 9)), st.lists(st.integers(0, 9), max_size=20), st.booleans())
def test_bad_samples_do_not_cost_the_batch(
    broken: set[int], ids: list[int], says_which: bool
) -> None:
    source = Minimal(broken, says_which)
    samples, errors = source.read_each(ids)
    assert samples == [None if i in broken else b"%d" % i for i in ids]
    assert set(errors) == {index for index, i in enumerate(ids) if i in broken}
    data, offsets, packed_errors = source.read_packed(ids)
    assert unpack(data, offsets) == [sample or b"" for sample in samples]
    assert set(packed_errors) == set(errors)


def test_only_what_failed_is_left_out_of_the_second_read() -> None:
    source = Minimal({2, 3})
    source.read_each(range(10))
    assert source.calls == 2


def test_storage_that_is_down_is_not_asked_sample_by_sample() -> None:
    source = Minimal({2}, says_which=False)
    source.error = SourceUnavailable
    samples, errors = source.read_each(range(10))
    assert source.calls == 1
    assert samples == [None] * 10
    assert set(errors) == set(range(10))


def test_errors_that_are_not_of_the_source_pass() -> None:
    source = Minimal()
    source.read = lambda ids: 1 / 0
    with pytest.raises(ZeroDivisionError):
        source.read_each([1])


def test_what_a_source_has_to_define_is_named() -> None:
    with pytest.raises(NotImplementedError, match="__len__"):
        len(BaseSource())
    with pytest.raises(NotImplementedError, match="read"):
        BaseSource().read([0])


def test_it_is_a_context_manager_and_names_samples() -> None:
    with Minimal() as source:
        assert source.name(3) == "sample 3"


def test_failed_ids_of_an_error_that_does_not_say() -> None:
    assert SampleNotFound("gone").ids == []
    assert SampleNotFound("gone", [4]).ids == [4]


def test_checked_ids_are_u32_and_contiguous() -> None:
    for ids in ([1, 2], np.array([1, 9, 2, 9], np.uint64)[::2], (1, 2)):
        checked = check_ids(ids, 3)
        assert checked.dtype == np.uint32
        assert checked.flags.c_contiguous
        assert checked.tolist() == [1, 2]
    with pytest.raises(ConfigError, match="id 3 is out of range: this source has ids 0 to 2"):
        check_ids([0, 3], 3)
    for not_flat in (1, [[1]], [True], [1.0], ["1"]):
        with pytest.raises(ConfigError, match="flat array of integers"):
            check_ids(not_flat, 3)
