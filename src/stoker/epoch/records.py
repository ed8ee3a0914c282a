"""What a loader has counted since it was made, and before that in the run it resumes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Failure
from stoker.epoch.stats import Stats, Visits, from_counters

log = logging.getLogger("stoker")


class Records:
    """The books of one rank's loader, kept in the training process by one thread."""

    def __init__(self, num_samples: int) -> None:
        self.epochs: list[Stats] = []
        """Of each epoch that has ended, abandoned ones included."""
        self.epoch = 0
        """The epoch of the books that are open or were closed last."""
        self.failures: dict[int, Failure] = {}
        """Samples that had to be replaced, by id, with the last reason."""
        self.last_stall = 0.0
        """Seconds that the training loop waited for the latest batch."""
        self._visits = Visits(num_samples)
        self._rescoring_seconds = 0.0
        self._stall_seconds = self._epoch_seconds = 0.0  # the latter of epochs that are over
        self._idle_seconds = 0.0  # of the stall of this epoch, without what the loop's thread did
        self._before = Stats()
        self._began: Stats | None = None
        self._began_at = self._last_at = 0.0

    def stats(self, counters: Mapping[str, Any] | None, share: int, **counts: Any) -> Stats:
        """Return all counts; those of the run before while ``counters`` are None.

        ``counters`` are those of :meth:`Store.stats <stoker.store.Store.stats>`, with ``counts`` of
        others on top; ``share``: how many samples are this rank's.
        """
        if counters is None:
            return self._before
        return from_counters(
            counters,
            rescoring_seconds=self._rescoring_seconds,
            stall_seconds=self._stall_seconds,
            epoch_seconds=self._epoch_seconds + self._seconds,
            coverage=self._visits.coverage(share),
            ess=self._visits.ess(share),
            **counts,
        ).plus(self._before)

    def begin_epoch(self, epoch: int, earlier: NDArray[np.uint32], now: Stats) -> None:
        """Open the books of an epoch in which ``earlier`` ids ``u32[n]`` were handed out before."""
        self.epoch = epoch
        self._visits.begin_epoch()
        self._visits.add(earlier)
        self._began = now
        self._began_at = self._last_at = time.perf_counter()
        self._idle_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether an epoch is in progress."""
        return self._began is not None

    def finish_epoch(self, now: Stats) -> None:
        """Close the books of the epoch in progress."""
        assert self._began is not None
        self.epochs.append(now.since(self._began))
        self._epoch_seconds += self._seconds
        self._began = None

    @property
    def _seconds(self) -> float:
        """How long the epoch in progress took up to its latest batch."""
        return 0.0 if self._began is None else self._last_at - self._began_at

    def supply(self) -> float:
        """Return what storage gave in the epoch that ended last, as a share of what training took.

        See ``Scores.supplies``. What the training loop's own thread does in the loader (taking
        batches over, decoding them without workers) is not waiting for storage. NaN where nothing
        was read or next to no time passed.
        """
        last, seconds = self.epochs[-1], self._last_at - self._began_at
        if not last.accesses or not last.fetched or seconds <= 0:
            return math.nan
        working = max(0.0, 1 - self._idle_seconds / seconds)
        return working * last.fetched / last.accesses

    def add_batch(self, ids: NDArray[np.uint32], failures: Iterable[Failure]) -> None:
        """Count a batch of samples ``u32[n]`` that is handed out, and what was replaced in it."""
        self._last_at = time.perf_counter()
        self._visits.add(ids)
        for failure in failures:
            if failure.id not in self.failures:
                log.warning("skipped %s: %s", failure.name, failure.reason)
            self.failures[failure.id] = failure

    def add_stall(self, seconds: float, computed: float) -> None:
        """Count time that the training loop waited, of which its thread ``computed`` that much."""
        self._stall_seconds += seconds
        self._idle_seconds += seconds - computed
        self.last_stall = seconds

    def add_rescoring(self, seconds: float) -> None:
        """Count time spent on scoring samples again between epochs."""
        self._rescoring_seconds += seconds

    def restore(self, saved: Stats, failures: Iterable[Failure], now: Stats) -> None:
        """Make the counts, which are ``now``, those of a saved state, and count on from there."""
        self._before = saved.since(now).plus(self._before)
        self.failures = {failure.id: failure for failure in failures}
