"""What a replay counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.epoch.report import table
from stoker.sampler.draws import coverage, ess
from stoker.shared import scratch
from stoker.sim.clock import EpochTime
from stoker.types import Outcome


@dataclass(frozen=True)
class EpochResult:
    """One epoch; ``accesses`` = ``hits`` + ``substituted`` + ``fetched`` + ``packaged``."""

    epoch: int
    accesses: int
    hits: int
    substituted: int
    fetched: int
    packaged: int
    hit_bytes: int
    """Bytes of the samples that hit."""
    served_bytes: int
    """Bytes of all samples served."""
    package_reads: int
    """Packages read for the cache."""
    ess: float
    """Effective sample size of how often each sample was served, / N."""
    coverage: float
    """Share of the samples that were served at all."""
    time: EpochTime | None = None
    """How long it would take, where conditions were given."""
    read_ahead: int = 0
    """Samples read before they were asked for, in this epoch or the next one; those twice that were
    evicted in between."""


@dataclass(frozen=True)
class SimResult:
    """A replay, epoch by epoch. Ratios are over all accesses of the epochs it has."""

    recipe: str
    num_samples: int
    cache_share: float
    """Cache bytes / bytes of the data set."""
    per_epoch: tuple[EpochResult, ...]

    @property
    def hit_ratio(self) -> float:
        """Hits / accesses; what a paper calls hits may be this plus :attr:`substituted_ratio`."""
        return self._share(lambda epoch: epoch.hits)

    @property
    def byte_hit_ratio(self) -> float:
        """Bytes that hit / bytes served."""
        served = sum(epoch.served_bytes for epoch in self.per_epoch)
        return sum(epoch.hit_bytes for epoch in self.per_epoch) / served if served else 0.0

    @property
    def substituted_ratio(self) -> float:
        """Share of the accesses for which another sample was served."""
        return self._share(lambda epoch: epoch.substituted)

    @property
    def packaged_ratio(self) -> float:
        """Share of the accesses served by a sample that came with a package."""
        return self._share(lambda epoch: epoch.packaged)

    @property
    def ess(self) -> float:
        """Effective sample size / N, mean over epochs."""
        return _mean([epoch.ess for epoch in self.per_epoch])

    @property
    def coverage(self) -> float:
        """Share of the samples visited in an epoch, mean over epochs."""
        return _mean([epoch.coverage for epoch in self.per_epoch])

    @property
    def seconds(self) -> float:
        """Seconds of all epochs; NaN without conditions, as for the next two."""
        return self._timed(lambda time: time.seconds)

    @property
    def stall_seconds(self) -> float:
        """Of these, how long training waited for batches."""
        return self._timed(lambda time: time.stall_seconds)

    @property
    def utilisation(self) -> float:
        """Share of the time in which training computed."""
        return 1 - self.stall_seconds / self.seconds if self.seconds else 1.0

    def _repr_html_(self) -> str:
        """Return a small table, for notebooks."""
        rows = [
            (
                epoch.epoch,
                f"{epoch.accesses:,}",
                f"{epoch.hits / max(1, epoch.accesses):.1%}",
                f"{epoch.substituted:,}",
                f"{epoch.packaged:,}",
                f"{epoch.fetched:,}",
            )
            for epoch in self.per_epoch
        ]
        head = ("epoch", "samples", "hits", "substituted", "packaged", "fetched")
        title = f"{self.recipe}, cache {self.cache_share:.1%}: hits {self.hit_ratio:.1%}"
        return f"<p>{escape(title)}</p>" + table(head, rows)

    def after(self, epochs: int) -> SimResult:
        """Return the same without the first ``epochs``: the first one fills the cache."""
        rest = self.per_epoch[epochs:]
        return SimResult(self.recipe, self.num_samples, self.cache_share, rest)

    def _timed(self, part: Callable[[EpochTime], float]) -> float:
        times = [epoch.time for epoch in self.per_epoch]
        return sum(math.nan if time is None else part(time) for time in times)

    def _share(self, count: Callable[[EpochResult], int]) -> float:
        accesses = sum(epoch.accesses for epoch in self.per_epoch)
        return sum(map(count, self.per_epoch)) / accesses if accesses else 0.0


_HIT = list(Outcome).index(Outcome.HIT)
_NUMBERS = [np.int8(outcome) for outcome in Outcome]  # compared in a fifth of the time


class Tally:
    """Counts the accesses of one epoch over samples of ``sizes`` (``i64[N]``, bytes)."""

    def __init__(self, epoch: int, sizes: NDArray[np.int64]) -> None:
        self.epoch, self._sizes = epoch, sizes
        # Of samples of one size the bytes follow from counts, in half of the time.
        is_one = sizes.strides == (0,) or bool((sizes == sizes[0]).all())
        self._one_size = int(sizes[0]) if is_one else None
        self._outcomes = np.zeros(len(Outcome), np.int64)
        self._hit_bytes = self._served_bytes = 0
        self._counts: NDArray[np.int32] = scratch(len(sizes), np.int32)

    def add(self, ids: NDArray[np.uint32], outcomes: NDArray[np.int8]) -> None:
        """Count samples ``u32[n]`` that were served so."""
        core.count(self._counts, ids)  # first, as a thread may serve in that time
        counts = [int(np.count_nonzero(outcomes == number)) for number in _NUMBERS]
        self._outcomes += counts
        if self._one_size is None:
            sizes = self._sizes.take(ids)
            self._served_bytes += int(sizes.sum())
            self._hit_bytes += int(sizes[outcomes == Outcome.HIT].sum())
        else:
            self._served_bytes += len(ids) * self._one_size
            self._hit_bytes += counts[_HIT] * self._one_size

    def result(
        self, package_reads: int, time: EpochTime | None = None, read_ahead: int = 0
    ) -> EpochResult:
        """Return what was counted, here and elsewhere, and the time given."""
        of = dict(zip(Outcome, self._outcomes.tolist(), strict=True))
        return EpochResult(
            self.epoch,
            accesses=sum(of.values()),
            hits=of[Outcome.HIT],
            substituted=of[Outcome.SUBSTITUTED],
            fetched=of[Outcome.FETCHED],
            packaged=of[Outcome.PACKAGED],
            hit_bytes=self._hit_bytes,
            served_bytes=self._served_bytes,
            package_reads=package_reads,
            ess=ess(self._counts) / len(self._sizes),
            coverage=coverage(self._counts),
            time=time,
            read_ahead=read_ahead,
        )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
