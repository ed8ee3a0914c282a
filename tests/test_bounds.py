"""The formulas of `stoker doctor`, against what they are derived from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stoker.bounds import (
    Rates,
    bound_by,
    epoch,
    largest_miss_ratio,
    rate_fed,
    smallest_cache,
    workers_for,
)


def test_the_smallest_cache_is_where_the_stall_ends() -> None:
    rates = Rates(storage=600, decode=5000, compute=1000)
    assert largest_miss_ratio(rates) == pytest.approx(0.6)
    assert smallest_cache(rates) == pytest.approx(0.4)
    stalls = [epoch(rates, 10_000, c).stall_seconds or 0.0 for c in np.linspace(0, 1, 101)]
    assert all(stall > 1e-9 for stall in stalls[:40])
    assert all(stall <= 1e-9 for stall in stalls[40:])


def test_an_epoch_is_its_slowest_part() -> None:
    rates = Rates(storage=500, decode=2000, compute=1000)
    bare = epoch(rates, 10_000, 0.0)
    assert (bare.seconds, bare.stall_seconds, bare.stall_share) == (20, 10, 0.5)
    half = epoch(rates, 10_000, 0.5)
    assert (half.seconds, half.stall_seconds) == (10, 0)
    assert epoch(Rates(storage=500), 1000, 0.2).seconds == pytest.approx(1.6)
    assert epoch(Rates(storage=500), 1000, 0.2).stall_share is None
    assert epoch(rates, 0, 0.0).stall_share == 0


@pytest.mark.parametrize(
    ("storage", "decode", "compute", "cached", "expected"),
    [
        (500, 2000, 1000, 0.0, "storage"),
        (500, 2000, 1000, 0.9, "compute"),
        (500, 2000, 1000, 0.5, "compute"),  # equal: more cache does not help
        (5000, 800, 1000, 0.0, "decode"),
        (500, None, None, 0.0, "storage"),
        (500, 100, None, 0.0, "decode"),
        (500, None, 2000, 1.0, "compute"),
    ],
)
def test_what_binds(
    storage: float, decode: float | None, compute: float | None, cached: float, expected: str
) -> None:
    assert bound_by(Rates(storage, decode, compute), cached) == expected


def test_slow_decoding_needs_no_cache_for_fast_training() -> None:
    # Storage need not be faster than what stands between it and training.
    assert smallest_cache(Rates(storage=1000, decode=800, compute=10_000)) == 0
    assert smallest_cache(Rates(storage=1000, compute=10_000)) == pytest.approx(0.9)
    assert smallest_cache(Rates(storage=1000)) is None is largest_miss_ratio(Rates(1000))


def test_the_rate_that_storage_feeds() -> None:
    assert rate_fed(100, 0.0) == 100
    assert rate_fed(100, 0.75) == pytest.approx(400)
    assert rate_fed(100, 1.0) == math.inf
    assert bound_by(Rates(100, compute=399), 0.75) == "compute"
    assert bound_by(Rates(100, compute=401), 0.75) == "storage"


def test_workers() -> None:
    assert workers_for(1000, 0.002, 16) == 3  # 2 just suffice
    assert workers_for(1000, 0.1, 16) == 16
    assert workers_for(10, 1e-6, 16) == 1
