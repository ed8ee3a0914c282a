from __future__ import annotations

import pytest

from stoker.jobs.metrics import WAIT_SECONDS, Waits, quantile


def test_waits_fall_into_buckets_that_double() -> None:
    waits = Waits()
    for seconds in (0.0, 1e-4, 1.1e-4, 1e9):
        waits.add(seconds)
    assert waits.counts[:2] == [2, 1]
    assert waits.counts[-1] == 1
    assert sum(waits.counts) == 4


def test_quantiles_lie_within_their_bucket() -> None:
    waits = Waits()
    for _ in range(99):
        waits.add(0.0015)
    waits.add(1.0)
    assert 0.0008 < quantile(waits.counts, 0.5) <= 0.0016
    assert 0.8192 <= quantile(waits.counts, 0.999) <= 1.6384
    waits.add(1e6)
    assert quantile(waits.counts, 1.0) == WAIT_SECONDS[-1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_without_waits_there_is_nothing_to_say(share: float) -> None:
    assert quantile(Waits().counts, share) == 0.0
