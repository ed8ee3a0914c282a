"""How much may be read ahead: what was asked for, 5 % of the cache, or a few batches."""

from __future__ import annotations

import pytest

from stoker.epoch.ranks import Ranks
from stoker.epoch.read_ahead import ranks_on_node, window_bytes, with_window
from stoker.policy.base import Region
from stoker.prefetch.reading import WINDOW


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
