"""What the counts of a loader mean: whether training waits, for what, and what to change."""

from __future__ import annotations

import os
from math import ceil
from typing import TYPE_CHECKING

from stoker.bounds import Rates, smallest_cache

if TYPE_CHECKING:
    from stoker.epoch.stats import Stats

_LITTLE = 0.05  # of the time: less waiting than that is not worth a change


def verdict_of(stats: Stats) -> str:
    """Return it in one line; empty before anything was served."""
    if not stats.accesses or stats.epoch_seconds <= 0:
        return ""
    share = min(1.0, stats.stall_seconds / stats.epoch_seconds)
    if share <= _LITTLE:
        return f"training waits {share:.0%} of the time: it is the limit itself, all is well"
    if _storage_share(stats) >= 0.5:
        return f"training waits {share:.0%} of the time, for storage: {_storage_advice(stats)}"
    waits = f"training waits {share:.0%} of the time, for decoding and transforms: "
    cores = len(os.sched_getaffinity(0))
    if stats.workers < cores:
        return waits + f"num_workers is {stats.workers}, and there are {cores} processors"
    return waits + 'all processors are busy; cache_stage="decoded" saves the decoding'


def _storage_share(stats: Stats) -> float:
    """Return the share of the loader's work that was reading, or waiting for who reads."""
    # Workers that training waits for have no rest.
    spent = stats.workers * stats.epoch_seconds if stats.workers else stats.stall_seconds
    return (stats.source_seconds + stats.wait_seconds) / spent


def _storage_advice(stats: Stats) -> str:
    """Return what lets training wait less for storage."""
    cached = min(1.0, stats.cache_bytes / stats.data_bytes) if stats.data_bytes else 0.0
    held = f"the cache holds {cached:.0%} of the bytes"
    if cached and stats.fetched > 0.9 * stats.accesses:
        return f"{held}; if this was the first epoch, later ones read less"
    trained = max(stats.epoch_seconds - stats.stall_seconds, 1e-9)
    rates = Rates(stats.fetched / stats.epoch_seconds, compute=stats.accesses / trained)
    needed = smallest_cache(rates) or 0.0
    if needed > cached:
        return (
            f"{held}; more num_workers or prefetch_bytes read more at once, and with "
            f'cache="{ceil(100 * needed)}%" or a cache_dir storage keeps up as it is'
        )
    return f"{held}, which is enough if more is read at once: num_workers, prefetch_bytes"
