"""Backoff: full jitter within its bounds, deadlines, and what is refused."""

from __future__ import annotations

import random

import pytest

from stoker.errors import ConfigError
from stoker.source import Retry


def test_waits_are_drawn_from_all_of_a_range_that_doubles() -> None:
    retry = Retry(first=0.1, longest=1.0, throttled=3.0)
    draw = random.Random(0)
    for failures, bound in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (2000, 1.0)):
        waits = [retry.wait(failures, False, draw) for _ in range(2000)]
        assert 0 <= min(waits) < 0.02 * bound
        assert 0.98 * bound < max(waits) <= bound
        assert abs(sum(waits) / 2000 - bound / 2) < 0.03 * bound
    assert max(retry.wait(5, True, draw) for _ in range(2000)) > 2.9


def test_it_is_over_by_time_or_by_number() -> None:
    assert not Retry(deadline=10).is_over(1000, 9.9)
    assert Retry(deadline=10).is_over(1, 10.0)
    assert Retry(attempts=3).is_over(3, 0.0)
    assert not Retry(attempts=3).is_over(2, 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"deadline": -1},
        {"unanswered": -1},
        {"first": float("nan")},
        {"longest": float("inf")},
        {"throttled": -0.5},
        {"attempts": 0},
    ],
)
def test_impossible_values_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
        Retry(**bad)
