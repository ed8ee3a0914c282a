"""What counts mean: what limits training, how much of its time stages take, what would help."""

from __future__ import annotations

import os
from math import ceil
from typing import TYPE_CHECKING, Literal

from stoker.bounds import Rates, smallest_cache

if TYPE_CHECKING:
    from stoker.epoch.stats import Stats

_LITTLE = 0.05  # of the time: less waiting than that is not worth a change
_LEAST = 0.001  # of the time: a step that takes less cannot be told from none

Bound = Literal["start-up", "compute", "storage", "decode"]
"""What limits the rate of training: that it starts, the step itself, reading, or decoding."""


def bound_of(stats: Stats) -> Bound:
    """Return what limits training, as far as counts tell."""
    if not stats.accesses or stats.epoch_seconds <= 0:
        return "start-up"
    most = max(_LITTLE * stats.epoch_seconds, stats.stall_seconds / 2)
    if stats.workers and stats.start_seconds > most:
        return "start-up"
    if stats.stall_share <= _LITTLE:
        return "compute"
    return "storage" if _storage_share(stats) >= 0.5 else "decode"


def shares_of(stats: Stats) -> dict[Bound, float]:
    """Return the share of the time that training spends on or waits for each; they add up to 1.

    Empty before any time has passed. Waiting is divided as the loader's work is.
    """
    seconds = stats.epoch_seconds
    if seconds <= 0:
        return {}
    stalled = min(stats.stall_seconds, seconds)
    started = min(stats.start_seconds, stalled) if stats.workers else 0.0
    waited = stalled - started
    read = waited * min(1.0, _storage_share(stats)) if waited > 0 else 0.0
    return {
        "start-up": started / seconds,
        "storage": read / seconds,
        "decode": (waited - read) / seconds,
        "compute": 1 - stalled / seconds,
    }


def headspace_of(stats: Stats) -> float:
    """Return an estimate of how many times as fast training would run if data were free.

    1 to 1000, from the time that it waits. Too high where a step continues while Python waits, as
    on an accelerator; too low where workers take processors from the step.
    """
    return 1 / max(1 - stats.stall_share, _LEAST)


def verdict_of(stats: Stats, *, may_be_first: bool = True) -> str:
    """Return in one line what counts mean; empty before anything was served.

    ``may_be_first``: whether they may be of the first epoch, which fills the cache.
    """
    bound, share = bound_of(stats), stats.stall_share
    if not stats.accesses or stats.epoch_seconds <= 0:
        return ""
    if bound == "start-up":
        started = stats.start_seconds / stats.epoch_seconds
        return (
            f"training waits {started:.0%} of the time for the first batch of an epoch: "
            "persistent_workers=True keeps workers between epochs, fewer num_workers start sooner"
        )
    if bound == "compute":
        return f"training waits {share:.0%} of the time: it is the limit itself, all is well"
    if bound == "storage":
        advice = _storage_advice(stats, may_be_first)
        return f"training waits {share:.0%} of the time, for storage: {advice}"
    waits = f"training waits {share:.0%} of the time, for decoding and transforms: "
    cores = len(os.sched_getaffinity(0))
    if stats.workers < cores:
        return waits + f"num_workers is {stats.workers}, and there are {cores} processors"
    return waits + 'all processors are busy; Cache(stage="decoded") saves the decoding'


def _storage_share(stats: Stats) -> float:
    """Return the share of the loader's work that was reading, or waiting for who reads."""
    # Workers that training waits for have no rest.
    spent = stats.workers * stats.epoch_seconds if stats.workers else stats.stall_seconds
    return (stats.source_seconds + stats.wait_seconds) / spent


def _storage_advice(stats: Stats, may_be_first: bool) -> str:
    """Return what lets training wait less for storage."""
    cached = min(1.0, stats.cache_bytes / stats.data_bytes) if stats.data_bytes else 0.0
    held = f"the cache holds {cached:.0%} of the bytes"
    if may_be_first and cached and stats.fetched > 0.9 * stats.accesses:
        return f"{held}; if this was the first epoch, later ones read less"
    trained = max(stats.epoch_seconds - stats.stall_seconds, 1e-9)
    rates = Rates(stats.fetched / stats.epoch_seconds, compute=stats.accesses / trained)
    needed = smallest_cache(rates) or 0.0
    if needed > cached:
        return (
            f"{held}; more num_workers or Cache(prefetch=) read more at once, and with "
            f'cache="{ceil(100 * needed)}%" or a disk below it storage keeps up as it is'
        )
    return f"{held}, which is enough if more is read at once: num_workers, Cache(prefetch=)"
