"""The memory in which workers and the prefetch process tell each other how far they are."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

STARTED, SERVED = 1, 2
"""What a worker says of an access: it sees to it itself now; it needs the cached copy no more."""

_HEAD = 4  # i64
_LIFE = 1.0  # seconds for which a sign of life counts


class Marks:
    """What became of each access of one epoch. Nobody needs a lock: each field has one writer.

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
        """Take the memory into use anew; the prefetch process starts within ``expect`` seconds."""
        self._head[0] += 1  # first, so that nobody takes the marks below for an older epoch's
        self.served[:] = 0
        self._head[[1, 3]] = 0
        self.attend(expect)

    def attend(self, seconds: float = _LIFE) -> None:
        """Say that the prefetch process lives, for so many seconds."""
        self._head[2] = time.monotonic_ns() + int(seconds * 1e9)

    def hand_out(self, end: int, is_full: bool = False) -> None:
        """Say that all accesses before ``end`` are claimed, or are not to be."""
        self._head[1] = end
        self._head[3] = is_full
