"""What happened so far in numbers, and what they mean: what limits training, what would help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from html import escape
from math import ceil
from typing import Any, Literal

from stoker.bounds import Rates, smallest_cache
from stoker.types import format_bytes

_LITTLE = 0.05  # of the time: less waiting than that is not worth a change
_LEAST = 0.001  # of the time: a step that takes less cannot be told from none

Bound = Literal["start-up", "compute", "storage", "decode"]
"""What limits the rate of training: that it starts, the step itself, reading, or decoding."""


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
        cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
        head = "<thead><tr><th></th><th>Stats</th></tr></thead>"
        return f"<table>{head}<tbody>{cells}</tbody></table><p>{escape(self.verdict)}</p>"

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
