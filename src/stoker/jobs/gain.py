"""What the cache gains a job: the time of a batch without it / the time with it."""

from __future__ import annotations

from typing import NamedTuple

_STALLED = 0.1  # share of the time from which on storage, and not computing, sets the pace
_NEW = 0.3  # weight of the latest block


class Block(NamedTuple):
    """Some batches in a row, as the training loop got them."""

    batches: int
    seconds: float
    stall_seconds: float
    """Of these the loop waited for batches."""
    accesses: int
    fetched: int
    source_seconds: float
    """Spent in reads, summed over those who read."""
    readers: int
    """How many read at once."""


class PassiveGain:
    """The gain, estimated from what is measured anyway. Not thread-safe.

    A batch takes max(compute, m x fetch), where ``fetch`` is what reading all of it would take and
    m the share that is read. So while the loop waits, fetch = time of a batch / m; while it does
    not, fetch is what the workers' own reads take. The gain is max(compute, fetch) /
    max(compute, m x fetch), iCache's T_without / T_with (HPCA 2023) without trying.
    """

    def __init__(self) -> None:
        self.compute_seconds = 0.0
        """Of a batch, without waiting."""
        self.fetch_seconds = 0.0
        """Of a batch, if all of it were read; 0: not known."""
        self._misses = 1.0
        self._is_first = True

    def add(self, block: Block) -> None:
        """Take the next batches into account."""
        if not block.batches or not block.accesses or block.seconds <= 0:
            return
        misses = block.fetched / block.accesses
        new = 1.0 if self._is_first else _NEW
        self._is_first = False
        self._misses += new * (misses - self._misses)
        compute = max(0.0, block.seconds - block.stall_seconds) / block.batches
        self.compute_seconds += new * (compute - self.compute_seconds)
        fetch = _fetch_seconds(block, misses)
        if fetch > 0:
            known = self.fetch_seconds > 0
            self.fetch_seconds += (_NEW if known else 1.0) * (fetch - self.fetch_seconds)

    @property
    def gain(self) -> float:
        """At least 1."""
        slowest = max(self.compute_seconds, self.fetch_seconds)
        now = max(self.compute_seconds, self._misses * self.fetch_seconds)
        return max(1.0, slowest / now) if now > 0 else 1.0


def _fetch_seconds(block: Block, misses: float) -> float:
    if not misses:
        return 0.0
    if block.stall_seconds > _STALLED * block.seconds:
        return block.seconds / block.batches / misses
    # What one read takes, for all samples of a batch, by so many readers.
    return block.source_seconds / misses / block.batches / max(1, block.readers)


class Probe:
    """The gain, measured: ``count`` batches without the cache, and then as many with it.

    iCache, HPCA 2023: T_without / T_with of 20 mini-batches each, at the start of an epoch. The
    first batch of each half only starts the clock. Not thread-safe.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """Batches that are to be read past the cache, from the start of an epoch; 0: none."""
        self._times: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether batches are ordinary ones again."""
        return not self.count or len(self._times) == 2 * self.count

    def begin(self) -> None:
        """Begin an epoch."""
        self._times = []

    def add(self, now: float) -> float | None:
        """Note that the loop got a batch at ``now`` seconds; return the gain once it is known."""
        if self.is_over:
            return None
        self._times.append(now)
        if len(self._times) < 2 * self.count:
            return None
        without = self._times[self.count - 1] - self._times[0]
        with_it = self._times[-1] - self._times[self.count]
        return without / with_it if with_it > 0 else None
