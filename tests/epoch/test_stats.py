from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.parts import numbers

from stoker import Cache
from stoker.epoch import stats
from stoker.epoch.stats import Stats, Visits, from_counters
from stoker.feed import Feed
from stoker.testing import SlowSource


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


def three_epochs(caplog: pytest.LogCaptureFixture, **options: Any) -> list[logging.LogRecord]:
    """What a training says that reads samples slowly."""
    slow = SlowSource(numbers(20), latency=0.005)
    cache = Cache("20%", prefetch=0)
    caplog.set_level(logging.INFO, "stoker")
    with Feed(slow, 2, cache=cache, decode_threads=0, **options) as feed:
        for _ in range(3):
            list(feed)
    return [each for each in caplog.records if "after two epochs" in each.message]


def test_a_training_says_once_what_limits_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "_SHORT", 0.0)
    [said] = three_epochs(caplog)
    assert said.levelno == logging.WARNING
    assert re.search(r"is bound by storage: training waits \d+% of the time", said.message)
    caplog.clear()
    assert not three_epochs(caplog, rank=1, world_size=2), "rank 0 says it"


def test_a_training_of_short_epochs_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not three_epochs(caplog)


def test_the_wait_for_the_first_batch_of_each_epoch_is_counted() -> None:
    with Feed(SlowSource(numbers(20), latency=0.01), 10, cache=0, decode_threads=0) as feed:
        for _ in range(2):
            for _ in feed:
                pass
        assert 0.02 <= feed.stats.start_seconds < feed.stats.epoch_seconds


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
