"""Standing aside: when it begins, when it ends, and what is counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.direct import DirectReading
from stoker.source.held import MemorySource

IDS = np.arange(1_000, dtype=np.uint32)


class Shared(MemorySource):
    """Says that a share of its samples is at hand."""

    share = 1.0
    looks = 0

    def at_hand(self, ids: NDArray[np.uint32]) -> float:
        self.looks += 1
        self.asked = ids
        return self.share


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def direct() -> tuple[DirectReading, Shared, Clock]:
    source, clock = Shared([b"sample"] * len(IDS)), Clock()
    return DirectReading(source, clock), source, clock


def test_it_begins_where_most_samples_are_at_hand() -> None:
    reading, source, _ = direct()
    assert not reading.is_on
    for share, is_on in ((1.0, True), (0.8, True), (0.7, False), (0.0, False)):
        source.share = share
        assert reading.begin(IDS) is reading.is_on is is_on
    assert source.asked[0] == 0 and source.asked[-1] == 999 and len(source.asked) <= 64


def test_it_looks_again_but_not_at_each_batch() -> None:
    reading, source, clock = direct()
    reading.begin(IDS)
    for _ in range(5):
        assert reading.takes(IDS[:10])
    assert source.looks == 1
    source.share, clock.now = 0.4, 10.0
    assert not reading.takes(IDS[:10])
    source.share, clock.now = 1.0, 20.0
    assert not reading.takes(IDS[:10]), "the rest of the epoch goes through the cache"
    assert reading.samples == 50
    assert reading.begin(IDS)


def test_an_epoch_without_samples() -> None:
    reading, source, _ = direct()
    source.share = 0.0
    assert not reading.begin(IDS[:0])
