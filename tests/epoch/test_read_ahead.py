"""How much may be read ahead; and standing aside: when it begins, when it ends, what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.epoch.ranks import Ranks, ranks_on_node
from stoker.epoch.read_ahead import DirectReading, window_bytes, with_window
from stoker.policy.base import Region
from stoker.prefetch.reading import WINDOW
from stoker.source.held import MemorySource


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("asked", "capacity", "expected"),
    [
        (10**9, 10**9, 5 * 10**7),  # a twentieth of the cache
        (10**6, 10**9, 10**6),  # no more than was asked for
        (10**9, 10**6, 60_000),  # six batches of 10 kB, as a twentieth is less
        (10**9, 10**5, 25_000),  # but a quarter of a small cache at most,
        (10**9, 50_000, 20_000),  # unless that holds no two batches
        (10**9, 15_000, 15_000),  # and no more than the cache itself
        (0, 10**9, 0),
    ],
)
def test_the_window_of_one_rank(asked: int, capacity: int, expected: int) -> None:
    assert window_bytes(asked, capacity, 10_000, 2, 1) == expected


def test_each_further_fetcher_has_room_for_what_it_reads() -> None:
    assert window_bytes(10**9, 10**8, 10_000, 2, 1, 2) == 60_000 + (8 << 20)
    assert window_bytes(10**9, 10**8, 10_000, 2, 1, 8) == 25 * 10**6, "a quarter at most"


def test_ranks_of_a_node_get_a_few_batches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert window_bytes(10**9, 10**6, 10_000, 2, 3) == 180_000
    assert ranks_on_node(Ranks(1, 3)) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the third is on another node
    assert ranks_on_node(Ranks(1, 3)) == 2


def test_the_window_comes_on_top_of_the_policys_regions() -> None:
    policy = (Region("high", 0.75), Region("low", 0.25))
    high, low, window = with_window(policy, 900, 100)
    assert (high.name, low.name, window.name) == ("high", "low", WINDOW)
    shares = [region.share * 1000 for region in (high, low, window)]
    assert shares == pytest.approx([675, 225, 100])
    assert [region.share for region in with_window(policy, 900, 0)] == [0.75, 0.25]


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
