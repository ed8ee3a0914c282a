"""What happened so far in numbers, what they mean, and the books of a rank that count it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch import html
from stoker.epoch.bar import Bar
from stoker.epoch.batch import Failure, ServedBatch
from stoker.epoch.mixed import SourceBooks
from stoker.epoch.verdict import bound_of, verdict_of
from stoker.jobs.metrics import Waits
from stoker.shared import SharedArray
from stoker.types import format_bytes

_SHORT = 5.0  # seconds of an epoch too short to say anything about

_AT_ONCE = 32  # batches
log = logging.getLogger("stoker")


@dataclass(frozen=True)
class Stats:
    """Counts of one rank's loader, over its workers. A snapshot; ``str()`` gives two lines.

    Workers count what they served, which includes batches drawn ahead of the training loop.
    ``accesses = hits + substituted + fetched + packaged``.
    """

    accesses: int = 0
    """Samples served."""
    hits: int = 0
    """Served from the cache without a read of the source."""
    substituted: int = 0
    """Another sample was served in its place."""
    fetched: int = 0
    """The source was read."""
    packaged: int = 0
    """Came with a package."""
    direct: int = 0
    """Of the samples fetched, those that workers read past the cache, as they lay in this machine's
    memory anyway; see :attr:`Cache.stands_aside`. Those drawn ahead count."""
    rescored: int = 0
    """Reads made only to rescore samples."""
    failed: int = 0
    """Reads that gave no sample, as :attr:`Loader.quarantine` lists."""
    bypassed: int = 0
    """Times the cache failed and was passed by."""
    evictions: int = 0
    """Samples evicted by all users of the cache."""
    non_finite: int = 0
    """Losses that were NaN or infinite."""
    bytes_from_source: int = 0
    """Bytes read from the source."""
    bytes_from_cache: int = 0
    """Bytes served from the cache."""
    disk_hits: int = 0
    """Samples that came up from the disk cache, for a worker or ahead by the prefetch process."""
    bytes_from_disk: int = 0
    """Bytes of those."""
    disk_errors: int = 0
    """Times that the disk cache failed; each costs reads of the source at most."""
    pool_hits: int = 0
    """Samples that came from the pool, for a worker or ahead by the prefetch process. Each is a
    hit when it is served."""
    bytes_from_pool: int = 0
    """Bytes of those."""
    pool_written: int = 0
    """Samples that were stored in the pool."""
    pool_dropped: int = 0
    """Samples that were not, as too many waited or a server refused."""
    pool_damaged: int = 0
    """Values in the pool that were damaged or someone else's, and not used."""
    pool_errors: int = 0
    """Failures of the pool's servers; each costs reads of the source at most."""
    packages_built: int = 0
    """Packages of samples of low importance that were stored, for all ranks of this machine."""
    package_reads: int = 0
    """Packages that were read for the cache, each one read, likewise."""
    package_bytes: int = 0
    """Bytes of samples that these brought."""
    packages_lost: int = 0
    """Packages that were missing or damaged."""
    repack_reads: int = 0
    """Packages read to build new ones."""
    rebuild_reads: int = 0
    """Samples read from the source to build packages."""
    tokens: int = 0
    """Tokens of the samples handed out, with ``batching=``."""
    token_places: int = 0
    """Tokens that their batches have room for."""
    epoch_seconds: float = 0.0
    """Seconds from the beginning of each epoch to its latest batch."""
    stall_seconds: float = 0.0
    """Seconds that the training loop waited for batches."""
    start_seconds: float = 0.0
    """Seconds from the beginning of each epoch to its first batch: workers start meanwhile."""
    source_seconds: float = 0.0
    """Seconds spent reading the source, summed over workers."""
    read: int = 0
    """Samples that workers read from the source, in ``source_seconds``."""
    read_ahead: int = 0
    """Samples that the prefetch process read from the source for this rank."""
    read_ahead_seconds: float = 0.0
    """Seconds that its reads for this rank took, summed over them."""
    wait_seconds: float = 0.0
    """Seconds spent waiting for a sample that another process was reading, likewise."""
    scoring_seconds: float = 0.0
    """Seconds that the training loop spent in ``observe()``."""
    rescoring_seconds: float = 0.0
    """Seconds between epochs in which samples were rescored."""
    cache_bytes: int = 0
    """Payload bytes in the cache now."""
    data_bytes: int = 0
    """Payload bytes of the samples that are visited; an estimate where sizes are."""
    workers: int = 0
    """Worker processes of this rank."""
    pool_open: int = 0
    """Servers of the pool that are passed by now, as they failed or were slow."""
    coverage: float = 0.0
    """Distinct samples handed out in the latest epoch / this rank's share of the data set."""
    ess: float = 0.0
    """Effective sample size of that epoch's counts n, (sum n)^2 / sum n^2, over the same share."""

    @property
    def hit_ratio(self) -> float:
        """Hits / accesses, from 0 to 1."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def byte_hit_ratio(self) -> float:
        """Bytes from the cache / all bytes, from 0 to 1."""
        total = self.bytes_from_cache + self.bytes_from_source
        return self.bytes_from_cache / total if total else 0.0

    @property
    def padding(self) -> float:
        """Share of padding in the batches, from 0 to 1; 0 without ``batching=``."""
        return 1 - self.tokens / self.token_places if self.token_places else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time that training waited for batches, from 0 to 1."""
        return min(1.0, self.stall_seconds / self.epoch_seconds) if self.epoch_seconds > 0 else 0.0

    @property
    def verdict(self) -> str:
        """Whether training waits, for what, and what to change, in a line; empty at first."""
        return verdict_of(self)

    @property
    def summary(self) -> str:
        """The most important counts, in a line."""
        direct = f" ({self.direct} direct, from the page cache)" if self.direct else ""
        padded = f", padding {self.padding:.1%}" if self.token_places else ""
        return (
            f"{self.accesses} samples, hits {self.hit_ratio:.1%} ({self.byte_hit_ratio:.1%} of "
            f"bytes), fetched {self.fetched}{direct}, substituted {self.substituted}, "
            f"stalled {self.stall_seconds:.2f} s{padded}"
        )

    def _repr_html_(self) -> str:
        """Return a small table, for notebooks."""
        rows = [
            ("samples", f"{self.accesses:,}"),
            ("hits", f"{self.hit_ratio:.1%} ({self.byte_hit_ratio:.1%} of bytes)"),
            ("substituted", f"{self.substituted:,}"),
            ("packaged", f"{self.packaged:,}"),
            ("fetched", f"{self.fetched:,}, {format_bytes(self.bytes_from_source)}"),
            ("training waits", f"{self.stall_seconds:.2f} s, {self.stall_share:.1%} of the time"),
        ]
        return html.table(("", "Stats"), rows) + f"<p>{escape(self.verdict)}</p>"

    def since(self, earlier: Stats) -> Stats:
        """Return what was counted after ``earlier``; ratios and ``cache_bytes`` are of now."""
        return self._with(earlier, -1)

    def plus(self, other: Stats) -> Stats:
        """Return these counts with those of ``other``; ratios and ``cache_bytes`` are of now."""
        return self._with(other, 1)

    def counts(self) -> dict[str, int | float]:
        """Return what adds up over time, by name, as plain numbers."""
        names = (field.name for field in fields(self) if field.name not in _OF_NOW)
        # Those that come from arrays are NumPy's numbers.
        return {name: type(getattr(_ZERO, name))(getattr(self, name)) for name in names}

    def _with(self, other: Stats, sign: int) -> Stats:
        added = {name: value + sign * getattr(other, name) for name, value in self.counts().items()}
        return replace(self, **added)

    def __str__(self) -> str:
        return f"{self.summary}\n{self.verdict}".rstrip()


_OF_NOW = {"cache_bytes", "data_bytes", "workers", "pool_open", "coverage", "ess"}
_ZERO = Stats()


def from_counters(counters: Mapping[str, Any], **others: Any) -> Stats:
    """Return Stats of :meth:`Store.stats`, with ``others`` on top."""
    names = {field.name for field in fields(Stats)}
    values = {name: value for name, value in counters.items() if name in names}
    tier = counters["tier"]
    values["evictions"] = int(tier.get("evictions", 0))
    values["cache_bytes"] = int(tier.get("payload_bytes", 0))
    values["disk_hits"] = int(tier.get("disk_hits", 0))
    values["bytes_from_disk"] = int(tier.get("disk_bytes", 0))
    values["disk_errors"] = int(tier.get("disk_errors", 0))
    pool = counters.get("pool", {})
    values |= {name: value for name, value in pool.items() if name in names and "pool" in name}
    values["bytes_from_pool"] = int(pool.get("pool_bytes", 0))
    return Stats(**{**values, **others})


class Visits:
    """How often each sample was handed out in the epoch under way, ``u32[N]``, in one process."""

    def __init__(self, num_samples: int) -> None:
        # In shared memory, or workers would keep a copy of each page written after their fork.
        self._shared = SharedArray.create(num_samples, np.uint32, name="stoker-visits")
        self._counts = self._shared.array
        self._waiting: list[NDArray[np.uint32]] = []

    def begin_epoch(self) -> None:
        """Start again from zero."""
        self._waiting.clear()
        self._counts[:] = 0

    def add(self, ids: NDArray[np.uint32]) -> None:
        """Count ids ``u32[n]``; repeats count."""
        # Many batches at once: after a training step the counts are in no cache of the processor.
        self._waiting.append(ids)
        if len(self._waiting) == _AT_ONCE:
            self._count()

    def _count(self) -> None:
        for ids in self._waiting:
            np.add.at(self._counts, ids, 1)
        self._waiting.clear()

    def coverage(self, share: int) -> float:
        """Return the distinct samples / ``share``, how many samples could be."""
        self._count()
        return np.count_nonzero(self._counts) / share if share else 0.0

    def ess(self, share: int) -> float:
        """Return the effective sample size of the counts / ``share``; 0 for no visits."""
        self._count()
        if not share:
            return 0.0
        counts = self._counts.astype(np.float64)
        squares = float(counts @ counts)
        return float(counts.sum()) ** 2 / squares / share if squares else 0.0


class Records:
    """The books of one rank's loader, kept in the training process by one thread.

    ``sources``: those of the sources of a mixture. ``bar`` shows how the epoch goes.
    """

    def __init__(
        self, num_samples: int, sources: SourceBooks | None = None, bar: Bar | None = None
    ) -> None:
        self._bar = bar
        self.sources = sources
        """Counts by source; None: there is one."""
        self.tokens_of: Callable[[NDArray[np.uint32]], tuple[int, int]] | None = None
        """Returns the tokens of a batch of ids ``u32[n]``, and those that it has room for."""
        self.epochs: list[Stats] = []
        """Of each epoch that has ended, abandoned ones included."""
        self.epoch = 0
        """The epoch of the books that are open or were closed last."""
        self.failures: dict[int, Failure] = {}
        """Samples that had to be replaced, by id, with the last reason."""
        self.waits = Waits()
        """How long the training loop waited for each batch."""
        self.last_stall = 0.0
        """Seconds that the training loop waited for the latest batch."""
        self._visits = Visits(num_samples)
        self._tokens = self._token_places = 0
        self._rescoring_seconds = 0.0
        self._stall_seconds = self._epoch_seconds = 0.0  # the latter of epochs that are over
        self._start_seconds = 0.0
        self._awaits_first = False  # whether no batch of the epoch has come yet
        self._idle_seconds = 0.0  # of the stall of this epoch, without what the loop's thread did
        self._before = Stats()
        self._began: Stats | None = None
        self._began_at = self._last_at = 0.0

    def stats(self, counters: Mapping[str, Any] | None, share: int, **counts: Any) -> Stats:
        """Return all counts; those of the run before while ``counters`` are None.

        ``counters`` are those of :meth:`Store.stats <stoker.store.Store.stats>`, with ``counts`` of
        others on top; ``share``: how many samples are this rank's, 0 where coverage and effective
        sample size, which take a pass over all samples, are not needed.
        """
        if counters is None:
            return self._before
        return from_counters(
            counters,
            rescoring_seconds=self._rescoring_seconds,
            stall_seconds=self._stall_seconds,
            start_seconds=self._start_seconds,
            epoch_seconds=self._epoch_seconds + self._seconds,
            tokens=self._tokens,
            token_places=self._token_places,
            coverage=self._visits.coverage(share),
            ess=self._visits.ess(share),
            **counts,
        ).plus(self._before)

    def begin_epoch(
        self, epoch: int, earlier: NDArray[np.uint32], now: Stats, batches: int | None = None
    ) -> None:
        """Open the books of an epoch in which ``earlier`` ids ``u32[n]`` were handed out before.

        ``batches`` are to come; None: that is not known.
        """
        if self._bar is not None:
            self._bar.begin(epoch, batches)
        self.epoch = epoch
        self._visits.begin_epoch()
        self._visits.add(earlier)
        self._began = now
        self._began_at = self._last_at = time.perf_counter()
        self._awaits_first = True
        self._idle_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether an epoch is in progress."""
        return self._began is not None

    def end_epoch(self, now: Stats) -> None:
        """Close the books of the epoch in progress."""
        assert self._began is not None
        if self._bar is not None:
            self._bar.end()
        self.epochs.append(now.since(self._began))
        self._epoch_seconds += self._seconds
        self._began = None

    def say_verdict(self) -> None:
        """Log once what limits training: when two epochs have ended, the second not too short."""
        if len(self.epochs) != 2 or self.epochs[1].epoch_seconds < _SHORT:
            return
        last = self.epochs[1]
        bound, verdict = bound_of(last), verdict_of(last, may_be_first=False)
        level = logging.INFO if bound == "compute" else logging.WARNING
        log.log(level, "after two epochs, training is bound by %s: %s", bound, verdict)

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

    def add_batch(self, batch: ServedBatch, failures: Iterable[Failure]) -> None:
        """Count a batch that is handed out, and what was replaced in it."""
        self._last_at = time.perf_counter()
        if self._awaits_first:
            self._awaits_first = False
            self._start_seconds += self._last_at - self._began_at
        self._visits.add(batch.ids)
        if self.tokens_of is not None:
            tokens, places = self.tokens_of(batch.ids)
            self._tokens += tokens
            self._token_places += places
        if self.sources is not None:
            self.sources.add(batch.ids, batch.outcomes)
        self.waits.add(self.last_stall)
        if self._bar is not None:
            self._bar.add(len(batch.ids), self.last_stall)
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
