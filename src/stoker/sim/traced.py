"""The report of a recorded training."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.report import write_report
from stoker.epoch.stats import Stats
from stoker.jobs.metrics import Waits
from stoker.sim.trace import EpochTrace, Trace
from stoker.types import Outcome


def write_trace_report(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write what ``trace`` tells of each epoch to an HTML page.

    Time and waits are those of the first rank, counts those of all. Raises
    :class:`~stoker.errors.ConfigError` for a damaged trace or one without an epoch, and OSError.
    """
    sizes, waits, epochs = trace.sizes, Waits(), []
    visited = np.zeros(len(sizes), np.bool_)
    for epoch in trace:
        epochs.append(stats_of(epoch, sizes))
        visited[epoch.asked] = True
        for seconds in epoch.stalls.tolist():
            waits.add(seconds)
    facts = {name: trace.about[name] for name in ("recipe", "num_samples", "seed")}
    facts |= {name: trace.run[name] for name in ("world_size", "batch_size", "num_workers")}
    write_report(path, facts, epochs, waits.counts, sizes[visited], int(trace.run["cache_bytes"]))


def stats_of(epoch: EpochTrace, sizes: NDArray[np.int64]) -> Stats:
    """Return the counts of an epoch over samples of ``sizes`` (``i64[N]``)."""
    of = {outcome: epoch.outcomes == outcome for outcome in Outcome}
    served = sizes[epoch.ids]
    times, stalls = epoch.times, epoch.stalls
    return Stats(
        accesses=len(epoch.ids),
        hits=int(of[Outcome.HIT].sum()),
        substituted=int(of[Outcome.SUBSTITUTED].sum()),
        fetched=int(of[Outcome.FETCHED].sum()),
        packaged=int(of[Outcome.PACKAGED].sum()),
        bytes_from_source=int(served[of[Outcome.FETCHED]].sum()),
        bytes_from_cache=int(served[~of[Outcome.FETCHED]].sum()),
        epoch_seconds=float(times[-1] - times[0] + stalls[0]) if len(times) else 0.0,
        stall_seconds=float(stalls.sum()),
    )
