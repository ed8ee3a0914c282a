"""Concurrency that climbs while throughput does."""

import pytest

from stoker.prefetch.lanes import ConcurrencyLimit


def run(
    limit: ConcurrencyLimit, rate_of: dict[int, float] | None, steps: int, start: float = 0.0
) -> list[int]:
    """Let a storage whose rate depends on the limit be read; return the limits."""
    now, limits = start, []
    for _ in range(steps):
        rate = min(limit.limit, 16) * 1000.0 if rate_of is None else rate_of[limit.limit]
        now += 0.05
        limit.done(int(rate * 0.05), now, saturated=True)
        limits.append(limit.limit)
    return limits


def test_it_starts_low_and_climbs_to_where_the_storage_saturates() -> None:
    limit = ConcurrencyLimit(least=4, most=64)
    limits = run(limit, None, 400)
    assert limits[0] == 4
    assert 16 <= limits[-1] <= 32
    assert max(limits) <= 40


def test_it_is_never_above_the_most() -> None:
    limit = ConcurrencyLimit(least=4, most=10)
    assert max(run(limit, None, 300)) == 10


def test_it_halves_when_throttled_and_waits_before_it_climbs_again() -> None:
    limit = ConcurrencyLimit(least=4, most=64)
    run(limit, None, 400)
    before = limit.limit
    limit.throttled()
    assert limit.limit == before // 2
    assert max(run(limit, None, 10, start=100.0)) == before // 2
    assert run(limit, None, 200, start=200.0)[-1] > before // 2


def test_idle_time_is_no_measurement() -> None:
    limit = ConcurrencyLimit(least=4, most=64)
    for step in range(100):
        limit.done(10, step * 1.0, saturated=False)
    assert limit.limit == 4


@pytest.mark.parametrize("times", [1, 10])
def test_it_is_never_below_the_least(times: int) -> None:
    limit = ConcurrencyLimit(least=4)
    for _ in range(times):
        limit.throttled()
    assert limit.limit == 4


def test_from_a_first_limit_it_doubles_until_that_brings_nothing() -> None:
    limit = ConcurrencyLimit(4, 64, first=8)
    limits = run(limit, None, 12)
    assert list(dict.fromkeys(limits)) == [8, 17, 35]
    assert limits[-1] == 17
    limits = run(limit, None, 400, start=10.0)
    assert max(limits) <= 26
    limit = ConcurrencyLimit(4, 64, first=100)
    assert limit.limit == 64
