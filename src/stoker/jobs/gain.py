"""What a job gains: by the cache, estimated and measured, and if data were free (the headspace)."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.node.memory import read_memory

MOST_BATCHES = 16
"""That a probe holds back."""
MOST_BYTES = 256 << 20
"""Of these batches, and no more than a quarter of the memory that is free."""
MOST_SECONDS = 10.0
"""For which they are collected; a batch that is waited for then is waited for anyway."""
_LEAST = 3  # batches that tell anything
_DEEPEST = 6  # levels of a batch whose bytes are counted
_STALLED = 0.1  # share of the time from which on the loop is said to wait
_BUSY = 0.9  # share of the time from which on storage is said to be what it waits for
_NEW_BLOCK = 0.3  # weight of the latest block
_LEAST_HALF = 2  # batches of half a probe, of which the first only starts the clock
_T = TypeVar("_T")


class Block(NamedTuple):
    """Some batches in a row, as the training loop got them, and the reads in that time."""

    batches: int
    seconds: float
    stall_seconds: float
    """Of these the loop waited for batches."""
    accesses: int
    read: int
    """Samples that were read from the source, by workers and by the prefetch process."""
    worker_seconds: float
    """Spent in the workers' reads, summed over these."""
    ahead_seconds: float
    """Seconds in which the prefetch process was reading, with any number of reads in progress."""

    @property
    def busy_seconds(self) -> float:
        """In which something was being read, at most: which reads overlapped is unknown."""
        return min(self.seconds, self.worker_seconds + self.ahead_seconds)


class PassiveGain:
    """The gain, estimated from existing measurements. Not thread-safe.

    A batch takes max(work, m x fetch), where ``fetch`` is what reading all of it would take, m the
    share that is read, and ``work`` all that happens meanwhile. So without the cache it would take
    max(work, fetch), and the gain, iCache's T_without / T_with (HPCA 2023), is fetch / the time
    that a batch does take, or 1.

    To read a sample takes the time in which the source was being read / the samples that were
    read then. That is exact while the loop waits for nothing else; at other times the source could
    do more, and it is an upper bound. So what was known when the loop waited is kept while it does
    not, as it does not once the cache works.

    Times are means over as many accesses as an epoch has: what is read varies within one.
    """

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._sums = np.zeros(6)  # batches, seconds, stalled, accesses, read, busy
        self._length = math.inf  # accesses of an epoch
        self._accesses = 0  # of this one so far
        self._sample_seconds = math.inf  # to read one, for all who read together

    def begin_epoch(self) -> None:
        """Note that the blocks to come are of another epoch."""
        if self._accesses:
            self._length = self._accesses
        self._accesses = 0

    def add(self, block: Block) -> None:
        """Add the next batches."""
        if not block.batches or not block.accesses or block.seconds <= 0:
            return
        self._accesses += block.accesses
        self._blocks.append(block)
        self._sums += _row(block)
        while self._sums[3] - self._blocks[0].accesses >= self._length:
            self._sums -= _row(self._blocks.popleft())
        self._learn(block)

    @property
    def gain(self) -> float:
        """At least 1."""
        batches, seconds = self._sums[:2]
        return max(1.0, self.fetch_seconds * float(batches / seconds)) if seconds > 0 else 1.0

    @property
    def fetch_seconds(self) -> float:
        """Of a batch, if all of it were read; 0: not known."""
        batches, accesses = self._sums[[0, 3]].tolist()
        return self._sample_seconds * accesses / batches if self._is_known else 0.0

    @property
    def compute_seconds(self) -> float:
        """Of a batch, without waiting."""
        batches, seconds, stalled = self._sums[:3].tolist()
        return max(0.0, seconds - stalled) / batches if batches else 0.0

    @property
    def _is_known(self) -> bool:
        return math.isfinite(self._sample_seconds)

    def _learn(self, block: Block) -> None:
        """Learn what it takes to read a sample; see the class."""
        is_stalled = block.stall_seconds > _STALLED * block.seconds
        if block.read and is_stalled and block.busy_seconds > _BUSY * block.seconds:
            new = block.busy_seconds / block.read
            weight = _NEW_BLOCK if self._is_known else 1.0
            known = self._sample_seconds if self._is_known else 0.0
            self._sample_seconds = known + weight * (new - known)
            return
        read, busy = self._sums[4:].tolist()
        if read:
            self._sample_seconds = min(self._sample_seconds, busy / read)


def _row(block: Block) -> tuple[float, ...]:
    return *block[:5], block.busy_seconds


class Probe:
    """The gain, measured: ``count`` batches without the cache, and then as many with it.

    iCache, HPCA 2023: T_without / T_with of 20 mini-batches each, at the start of an epoch. The
    first batch of each half only starts the clock. Nothing is to be read ahead meanwhile: what
    lies ready would have been read in the other half's time, or before. Not thread-safe.
    """

    def __init__(self, count: int) -> None:
        self._most = count
        self.count = 0
        """Batches that are to be read past the cache, from the start of this epoch; 0: none."""
        self._times: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether batches are ordinary ones again."""
        return len(self._times) == 2 * self.count

    def begin(self, batches: int) -> None:
        """Begin an epoch of so many batches. One too short for both halves gets shorter ones."""
        half = min(self._most, batches // 2)
        self.count = half if half >= _LEAST_HALF else 0
        self._times = []

    def add(self, now: float) -> float | None:
        """Note that the loop got a batch at ``now`` seconds; return the gain once it is known."""
        if self.is_over:
            return None
        self._times.append(now)
        if not self.is_over:
            return None
        without = self._times[self.count - 1] - self._times[0]
        with_it = self._times[-1] - self._times[self.count]
        return without / with_it if with_it > 0 else None


class HeldBack(Generic[_T]):
    """Yields what ``arriving`` does, and when a probe is wanted, some of it without a wait.

    Ours. The next batches are collected first and served then, one after the other: each is served
    once, in its turn and to the loop that it is for, so that an exact run stays exact; the run
    stands still for as long as it takes to collect them. From one request of the loop to the next
    then passes what a step takes where data is free. The first of these times do not count, as an
    accelerator's queue fills meanwhile, and of the others the median does: too short where the
    loop never waits for the accelerator.

    ``row`` is the job's of the table, which says what is wanted; ``clock`` gives seconds. An error,
    and the end, come in their turn too. For one thread.
    """

    def __init__(
        self,
        arriving: Iterator[_T],
        row: NDArray[np.void],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arriving, self._row, self._clock = arriving, row, clock
        self._held: deque[_T] = deque()
        self._asked: list[float] = []  # when the loop asked for batches of the probe
        self._error: Exception | None = None  # that came in the place of the next

    def __iter__(self) -> HeldBack[_T]:
        return self

    def __next__(self) -> _T:
        if not self._asked:
            if self._row["probes_wanted"] == self._row["probes_done"]:
                return next(self._arriving)
            self._collect()
        self._asked.append(self._clock())
        if self._held:
            return self._held.popleft()
        self._tell()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._arriving)

    def _collect(self) -> None:
        room, deadline = _room(), self._clock() + MOST_SECONDS
        try:
            while len(self._held) < MOST_BATCHES and room > 0 and self._clock() < deadline:
                self._held.append(next(self._arriving))
                room -= bytes_of(self._held[-1])
        except Exception as error:
            self._error = error

    def _tell(self) -> None:
        """Publish what was measured; too few at the end of an epoch are no answer."""
        times, self._asked = np.diff(self._asked).tolist(), []
        if len(times) < _LEAST and isinstance(self._error, StopIteration):
            return
        is_known = len(times) >= _LEAST
        self._row["probe_batches"] = len(times)
        self._row["probe_seconds"] = median(times[len(times) // 4 :]) if is_known else 0.0
        self._row["probes_done"] = self._row["probes_wanted"]


def _room() -> int:
    """Return the bytes that may be held."""
    free = [read_memory().available]
    try:
        shared = os.statvfs("/dev/shm")  # where torch's workers may have them
        free.append(shared.f_bavail * shared.f_frsize)
    except OSError:
        pass
    return min(MOST_BYTES, *(room // 4 for room in free))


def bytes_of(part: Any, depth: int = _DEEPEST) -> int:
    """Return the bytes of the arrays and texts in a batch of whatever type, so deep down."""
    size = getattr(part, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(part, str | bytes | bytearray):
        return len(part)
    parts: Iterable[Any]
    if isinstance(part, Mapping):
        parts = part.values()
    elif isinstance(part, tuple | list):
        parts = part
    else:
        slots = [getattr(kind, "__slots__", ()) for kind in type(part).__mro__]
        names = [*getattr(part, "__dict__", ()), *chain.from_iterable(slots)]
        parts = [getattr(part, name, None) for name in names]
    return sum(bytes_of(each, depth - 1) for each in parts) if depth else 0
