"""Progress of workers and the prefetch process, in memory that both map."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.base import Source

STARTED, SERVED = 1, 2
"""What a worker says of an access: it sees to it itself now; it needs the cached copy no more."""

_HEAD = 4  # i64
_LIFE = 1.0  # seconds for which a sign of life counts
_STARTING = 5.0  # seconds that the prefetch process may take to start
_PATIENCE = 3.0  # seconds without any progress of it
_GLANCE = 0.002  # seconds between two looks
_NOTICED = 0.1  # seconds in which the prefetch process sees that its window can move


class Marks:
    """What became of each access of one epoch. No lock is needed: each field has one writer.

    ``memory`` (``u8[Marks.bytes(length)]``) is shared, and used again for a later epoch: that is
    seen by its ``generation``. What is read from it counts only if the generation is still the
    same afterwards.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._head: NDArray[np.int64] = memory[: _HEAD * 8].view(np.int64)
        self.served = memory[_HEAD * 8 :]
        """``u8[length]``: 0, then :data:`STARTED`, then :data:`SERVED`, set by workers."""

    @staticmethod
    def bytes(length: int) -> int:
        """Return the bytes that the marks of ``length`` accesses take."""
        return _HEAD * 8 + length

    @property
    def generation(self) -> int:
        """How often this memory has been taken into use."""
        return int(self._head[0])

    @property
    def handed_out(self) -> int:
        """Accesses, from the first, that the prefetch process has seen to: none will be claimed."""
        return int(self._head[1])

    @property
    def is_full(self) -> bool:
        """Whether no more is handed out until something is served, or started, by a worker."""
        return bool(self._head[3])

    @property
    def is_attended(self) -> bool:
        """Whether the prefetch process was alive a moment ago, or is expected to start."""
        return int(self._head[2]) > time.monotonic_ns()

    def begin(self, expect: float) -> None:
        """Reset the memory for use; the prefetch process starts within ``expect`` seconds."""
        self._head[0] += 1  # first, so that no process takes the marks below for an older epoch's
        self.served[:] = 0
        self._head[[1, 3]] = 0
        self.attend(expect)

    def attend(self, seconds: float = _LIFE) -> None:
        """Mark the prefetch process as alive for so many seconds."""
        self._head[2] = time.monotonic_ns() + int(seconds * 1e9)

    def hand_out(self, end: int, is_full: bool = False) -> None:
        """Mark all accesses before ``end`` as claimed, or not to be claimed."""
        self._head[1] = end
        self._head[3] = is_full


class Progress:
    """What became of each access of an epoch, in memory that workers and prefetch share.

    ``length`` accesses at most in an epoch of this rank. Two epochs are kept, as prefetch is in
    the next one before this one ends. Workers write to places of their own, so that no process
    needs a lock; passed to children it stays the same memory.

    A worker whose ``source`` would have to start something before it can read (``is_ready``)
    leaves the reading to a prefetch process that gets on, and only waits. With ``waits`` each does:
    that process reads blocks, and a worker sample by sample.
    """

    def __init__(self, length: int, source: Source | None = None, *, waits: bool = False) -> None:
        self._memory = [
            SharedArray.create(Marks.bytes(length), "u1", name="stoker-marks") for _ in "01"
        ]
        self._source, self._waits = source, waits
        self._is_first = True

    def begin(self, epoch: int, *, is_held: bool = False) -> SharedArray:
        """Return the memory of the :class:`Marks` of ``epoch``, all zero.

        ``is_held``: nothing is read ahead for now, and no worker need wait for that.
        """
        is_coming = self._is_first and not is_held
        self._marks(epoch).begin(_STARTING if is_coming else 0.0)
        self._is_first = False
        return self.memory(epoch)

    def memory(self, epoch: int) -> SharedArray:
        """Return the memory of the :class:`Marks` of ``epoch``, which has begun."""
        return self._memory[epoch % 2]

    def leave_out(self, epoch: int, which: NDArray[np.bool_]) -> None:
        """Say, before they are published, which accesses bool[A] are not to be read ahead."""
        self._marks(epoch).served[: len(which)][which] = SERVED

    def start(self, epoch: int, first: int, count: int) -> None:
        """Mark these accesses as taken by a worker, which reads what is not claimed yet."""
        marks = self._marks(epoch)
        if self._waits or (self._source is not None and not self._source.is_ready):
            _await(marks, first, first + count)
        marks.served[first : first + count] = STARTED

    def finish(self, epoch: int, first: int, count: int) -> None:
        """Mark these accesses as done."""
        self._marks(epoch).served[first : first + count] = SERVED

    def _marks(self, epoch: int) -> Marks:
        return Marks(self.memory(epoch).array)


def _await(marks: Marks, first: int, end: int) -> None:
    """Wait until the accesses ``first`` to ``end`` are handed out, as long as that gets on."""
    reached, since = marks.handed_out, time.monotonic()
    moved = since  # when the window last moved, or another process could have moved it
    while reached < end and marks.is_attended and time.monotonic() - since < _PATIENCE:
        if not marks.is_full or (marks.served[:first] != SERVED).any():
            moved = time.monotonic()
        elif time.monotonic() - moved > _NOTICED:
            return  # the window does not hold all of these
        time.sleep(_GLANCE)
        now = marks.handed_out
        if now > reached:
            reached = now
            moved = since = time.monotonic()
