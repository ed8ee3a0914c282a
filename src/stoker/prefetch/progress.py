"""How far a rank's workers are, for the prefetch process to see."""

from __future__ import annotations

import numpy as np

from stoker.prefetch.feed import SERVED, STARTED
from stoker.shared import SharedArray


class Progress:
    """What became of each access of an epoch, in memory that workers and prefetch share.

    ``length`` accesses at most in an epoch of this rank. Two epochs are kept, as prefetch is in
    the next one before this one ends. Workers write to places of their own, so that nobody
    needs a lock; passed to children it stays the same memory.
    """

    def __init__(self, length: int) -> None:
        self._marks = [SharedArray.create(length, np.uint8, name="stoker-served") for _ in "01"]

    def begin(self, epoch: int) -> SharedArray:
        """Return the marks of ``epoch``, ``u8[length]``, all zero."""
        marks = self._marks[epoch % 2]
        marks.array[:] = 0
        return marks

    def start(self, epoch: int, first: int, count: int) -> None:
        """Say that a worker sees to these accesses now; what is not claimed yet it reads."""
        self._marks[epoch % 2].array[first : first + count] = STARTED

    def finish(self, epoch: int, first: int, count: int) -> None:
        """Say that these accesses are over."""
        self._marks[epoch % 2].array[first : first + count] = SERVED
