from __future__ import annotations

import numpy as np

from stoker.pytorch import Stats
from stoker.pytorch.stats import Visits, from_counters


def test_ratios() -> None:
    stats = Stats(accesses=8, hits=2, bytes_from_cache=300, bytes_from_source=100)
    assert (stats.hit_ratio, stats.byte_hit_ratio) == (0.25, 0.75)
    assert Stats().hit_ratio == Stats().byte_hit_ratio == 0.0
    assert "hits 25.0% (75.0% of bytes)" in str(stats)


def test_differences() -> None:
    before = Stats(accesses=5, hits=1, coverage=1.0, cache_bytes=10)
    after = Stats(accesses=9, hits=4, coverage=0.5, cache_bytes=30)
    assert after.since(before) == Stats(accesses=4, hits=3, coverage=0.5, cache_bytes=30)


def test_counters_become_stats() -> None:
    counters = {"accesses": 3, "hits": 1, "tier": {"evictions": 7, "payload_bytes": 9}, "new": 1}
    assert from_counters(counters, stall_seconds=2.0) == Stats(
        accesses=3, hits=1, evictions=7, cache_bytes=9, stall_seconds=2.0
    )


def test_coverage_and_effective_sample_size() -> None:
    visits = Visits(10)
    assert (visits.coverage(10), visits.ess(10)) == (0.0, 0.0)
    visits.add(np.array([1, 2, 3, 1], np.uint32))
    assert visits.coverage(4) == 0.75
    assert visits.ess(10) == (4**2 / (4 + 1 + 1)) / 10
    visits.begin_epoch()
    visits.add(np.arange(10, dtype=np.uint32))
    assert (visits.coverage(10), visits.ess(10)) == (1.0, 1.0)


def test_counts_add_up_and_what_is_of_now_stays() -> None:
    now = Stats(accesses=3, stall_seconds=0.5, cache_bytes=10, coverage=0.5)
    before = Stats(accesses=4, stall_seconds=1.0, cache_bytes=99, coverage=1.0)
    both = now.plus(before)
    assert (both.accesses, both.stall_seconds) == (7, 1.5)
    assert (both.cache_bytes, both.coverage) == (10, 0.5)
    assert both.since(before) == now
    assert not {"cache_bytes", "coverage", "ess"} & both.counts().keys()


def test_counts_are_plain_numbers() -> None:
    counts = Stats(hits=np.int64(3), wait_seconds=np.float64(0.5)).counts()
    assert {type(value) for value in counts.values()} == {int, float}
