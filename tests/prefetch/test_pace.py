"""Concurrency that climbs while throughput does."""

import pytest

from stoker.prefetch.pace import Pace


def run(pace: Pace, rate_of: dict[int, float] | None, steps: int, start: float = 0.0) -> list[int]:
    """Let a storage whose rate depends on the limit be read; return the limits."""
    now, limits = start, []
    for _ in range(steps):
        rate = min(pace.limit, 16) * 1000.0 if rate_of is None else rate_of[pace.limit]
        now += 0.05
        pace.done(int(rate * 0.05), now, saturated=True)
        limits.append(pace.limit)
    return limits


def test_it_starts_low_and_climbs_to_where_the_storage_saturates() -> None:
    pace = Pace(least=4, most=64)
    limits = run(pace, None, 400)
    assert limits[0] == 4
    assert 16 <= limits[-1] <= 32
    assert max(limits) <= 40


def test_it_is_never_above_the_most() -> None:
    pace = Pace(least=4, most=10)
    assert max(run(pace, None, 300)) == 10


def test_it_halves_when_throttled_and_waits_before_it_climbs_again() -> None:
    pace = Pace(least=4, most=64)
    run(pace, None, 400)
    before = pace.limit
    pace.throttled()
    assert pace.limit == before // 2
    assert max(run(pace, None, 10, start=100.0)) == before // 2
    assert run(pace, None, 200, start=200.0)[-1] > before // 2


def test_idle_time_is_no_measurement() -> None:
    pace = Pace(least=4, most=64)
    for step in range(100):
        pace.done(10, step * 1.0, saturated=False)
    assert pace.limit == 4


@pytest.mark.parametrize("times", [1, 10])
def test_it_is_never_below_the_least(times: int) -> None:
    pace = Pace(least=4)
    for _ in range(times):
        pace.throttled()
    assert pace.limit == 4
