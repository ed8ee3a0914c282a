from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from stoker.epoch.stats import Stats, from_counters


def test_ratios() -> None:
    stats = Stats(accesses=8, hits=2, bytes_from_cache=300, bytes_from_source=100)
    assert (stats.hit_ratio, stats.byte_hit_ratio) == (0.25, 0.75)
    assert Stats().hit_ratio == Stats().byte_hit_ratio == 0.0
    assert "hits 25.0% (75.0% of bytes)" in str(stats)


MEASURED = Stats(
    accesses=1000,
    hits=200,
    fetched=800,
    epoch_seconds=10.0,
    data_bytes=1000,
    cache_bytes=200,
    workers=2,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"stall_seconds": 0.4}, r"waits 4% of the time: it is the limit itself, all is well$"),
        # Storage gives 80 a second and training takes 1000 / 4: 1 - 80 / 250 are to be cached.
        (
            {"stall_seconds": 6.0, "source_seconds": 15.0},
            r'waits 60% .* for storage: the cache holds 20% .* with cache="68%" or a disk',
        ),
        (
            {"stall_seconds": 6.0, "source_seconds": 8.0, "wait_seconds": 7.0, "workers": 2},
            r"waits 60% of the time, for storage",
        ),
        (
            {"stall_seconds": 6.0, "source_seconds": 15.0, "cache_bytes": 900},
            r"holds 90% of the bytes, which is enough if more is read at once: num_workers",
        ),
        (
            {"stall_seconds": 6.0, "source_seconds": 15.0, "fetched": 1000, "hits": 0},
            r"holds 20% of the bytes; if this was the first epoch, later ones read less",
        ),
        (
            {"stall_seconds": 6.0, "start_seconds": 4.0},
            r"waits 40% of the time for the first batch of an epoch: persistent_workers=True",
        ),
        (
            {"stall_seconds": 6.0, "source_seconds": 1.0, "workers": 0},
            r"waits 60% of the time, for decoding and transforms: num_workers is 0, and",
        ),
        (
            {"stall_seconds": 6.0, "source_seconds": 1.0, "workers": 4096},
            r'for decoding and transforms: .*stage="decoded"',
        ),
    ],
)
def test_newcomer_6_the_verdict(change: dict[str, float], expected: str) -> None:
    counts = replace(MEASURED, **change)  # type: ignore[arg-type]
    assert re.search(expected, counts.verdict)
    assert str(counts) == f"{counts.summary}\n{counts.verdict}"


def test_newcomer_6_no_verdict_without_counts() -> None:
    assert Stats().verdict == ""
    assert str(Stats()) == Stats().summary


def test_differences() -> None:
    before = Stats(accesses=5, hits=1, coverage=1.0, cache_bytes=10)
    after = Stats(accesses=9, hits=4, coverage=0.5, cache_bytes=30)
    assert after.since(before) == Stats(accesses=4, hits=3, coverage=0.5, cache_bytes=30)


def test_counters_become_stats() -> None:
    counters = {"accesses": 3, "hits": 1, "tier": {"evictions": 7, "payload_bytes": 9}, "new": 1}
    assert from_counters(counters, stall_seconds=2.0) == Stats(
        accesses=3, hits=1, evictions=7, cache_bytes=9, stall_seconds=2.0
    )


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
