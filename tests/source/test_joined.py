"""JoinedSource: the conformance tests, and what its parts say of themselves."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, SampleCorrupt
from stoker.source import JoinedSource, MemorySource, Source
from stoker.source.base import BaseSource
from stoker.testing import SourceConformance


class TestJoinedSource(SourceConformance):
    def make(self, samples: list[bytes], tmp_path: Path) -> Source:
        parts = samples[:7], samples[7:8], samples[8:]
        return JoinedSource([MemorySource(part) for part in parts])


class Estimated(BaseSource):
    """Its sizes are estimates."""

    sizes_are_exact = False
    fingerprint = "estimated"
    sizes = np.full(3, 5, np.int64)

    def __len__(self) -> int:
        return 3

    def read(self, ids: object) -> list[bytes]:
        return [b"x" * (9 + int(i)) for i in np.asarray(ids)]


def numbered(first: int, count: int) -> MemorySource:
    return MemorySource([f"{i:04}".encode() for i in range(first, first + count)])


def test_estimates_in_one_part_leave_the_others_checked() -> None:
    joined = JoinedSource([numbered(0, 3), Estimated()])
    assert not joined.sizes_are_exact
    assert joined.read([4, 0]) == [b"x" * 10, b"0000"]

    class Cut(MemorySource):
        """Returns less than it says."""

        def read_packed(self, ids: object) -> object:  # type: ignore[override]
            data, offsets, errors = super().read_packed(ids)  # type: ignore[arg-type]
            return data[:-1], np.minimum(offsets, len(data) - 1), errors

    cut = JoinedSource([Estimated(), Cut([b"abc", b"def"])])
    _, errors = cut.read_each([0, 3, 4])
    assert list(errors) == [2] and isinstance(errors[2], SampleCorrupt)
    assert errors[2].ids == [4]


def test_errors_name_samples_of_the_whole() -> None:
    class Broken(MemorySource):
        def read_packed(self, ids: object) -> object:  # type: ignore[override]
            data, offsets, _ = super().read_packed(ids)  # type: ignore[arg-type]
            wrong = [int(i) for i in np.asarray(ids) if i == 1]
            error = SampleCorrupt("broken", wrong)
            rows = np.flatnonzero(np.asarray(ids) == 1).tolist()
            return data, offsets, dict.fromkeys(rows, error)

    joined = JoinedSource([numbered(0, 5), Broken([b"a", b"b", b"c"])])
    _, errors = joined.read_each([6, 0, 5])
    assert list(errors) == [0] and errors[0].ids == [6]
    with pytest.raises(SampleCorrupt) as raised:
        joined.read([0, 6])
    assert raised.value.ids == [6]


def test_sources_are_asked_at_once() -> None:
    both = threading.Barrier(2)

    class Meeting(MemorySource):
        def read_packed(self, ids: object) -> object:  # type: ignore[override]
            both.wait(30)  # raises if the other one is not asked meanwhile
            return super().read_packed(ids)  # type: ignore[arg-type]

    joined = JoinedSource([Meeting([b"a", b"b"]), Meeting([b"c", b"d"])])
    assert joined.read([3, 0, 2, 1]) == [b"d", b"a", b"c", b"b"]


def test_sources_may_be_asked_in_turn() -> None:
    asked = []

    class Noting(MemorySource):
        def read_packed(self, ids: object) -> object:  # type: ignore[override]
            asked.append(threading.get_ident())
            return super().read_packed(ids)  # type: ignore[arg-type]

    joined = JoinedSource([Noting([b"a"]), Noting([b"b"])], at_once=False)
    assert joined.read([1, 0]) == [b"b", b"a"]
    assert asked == [threading.get_ident()] * 2


def test_what_parts_say() -> None:
    one, other = numbered(0, 5), numbered(5, 4)
    joined = JoinedSource([one, other])
    assert joined.breaks.tolist() == [5]
    assert joined.name(6) == "sample 6" != other.name(1)
    assert joined.read_one(7) == b"0007"
    assert joined.fingerprint != JoinedSource([other, one]).fingerprint
    assert joined.fingerprint == JoinedSource([numbered(0, 5), numbered(5, 4)]).fingerprint
    assert joined.at_hand(np.arange(9, dtype=np.uint32)) == 0
    assert joined.at_hand(np.empty(0, np.uint32)) == 0
    assert not joined.is_private and joined.is_ready and joined.local_identity == ""
    assert joined.lanes == 0
    with pytest.raises(ConfigError, match="no sources"):
        JoinedSource([])
