"""What is brought into a cache before the first access: how much at once."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from support.doubles import CountingSource

from stoker.store.fill import fill, preload
from store.test_memory_tier import native_tier

NUM, ROOM = 1000, 1 << 20


class InUnits(CountingSource):
    """Samples in units, as pages have rows."""

    def __init__(self, breaks: Sequence[int]) -> None:
        super().__init__(NUM)
        self._breaks = np.array(breaks, np.int64)

    @property
    def breaks(self):
        return self._breaks


def preloaded(breaks: Sequence[int], ids: range = range(NUM)) -> list[list[int]]:
    source = InUnits(breaks)
    preload(source, native_tier(NUM, ROOM), np.array(ids, np.uint32), threads=1)
    return source.reads


@pytest.mark.parametrize("each", [1, 2, 64])
def test_files_of_few_samples_are_loaded_many_at_once(each: int) -> None:
    """A part ended with each unit: of files with one sample each, one was read at once."""
    reads = preloaded(range(each, NUM, each))
    assert [len(ids) for ids in reads] == [64] * 15 + [40]
    assert list(chain(*reads)) == list(range(NUM))


def test_units_stay_whole() -> None:
    bounds = [0, 30, 60, 70, 370, 371, 500, NUM]
    reads = preloaded(bounds[1:-1])
    assert [(ids[0], ids[-1] + 1) for ids in reads] == [
        (0, 60), (60, 70), (70, 370), (370, 371), (371, 500), (500, NUM),
    ]  # fmt: skip
    some = preloaded(bounds[1:-1], range(65, 400))
    assert [(ids[0], ids[-1] + 1) for ids in some] == [(65, 70), (70, 370), (370, 400)]


def test_without_units_64_are_read_at_once() -> None:
    reads = preloaded([])
    assert [len(ids) for ids in reads] == [64] * 15 + [40]
    assert list(chain(*reads)) == list(range(NUM))


def test_a_large_unit_is_divided_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.store.fill._BATCH_BYTES", 4000)
    source = InUnits([10, 700])
    filled = fill(source, native_tier(NUM, ROOM).arena, threads=1)
    assert filled.read == NUM
    assert sorted(chain(*source.reads)) == list(range(NUM))
    assert {10, 700} <= {ids[0] for ids in source.reads}
    assert max(int(source.sizes[ids].sum()) for ids in source.reads) <= 4000
    assert max(map(len, source.reads)) > 64
