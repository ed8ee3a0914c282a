"""Memory of batches that is used again."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_KEPT = 64 << 20  # unused bytes that are kept for what comes
_SMALL = 64 << 10  # bytes that malloc serves well


class Buffers:
    """Private memory for large arrays, which is used again once nothing refers to it.

    A batch that malloc gave lies on top of what the model's step has freed; freeing it gives all of
    that back to the system, which costs milliseconds, and the next step its page faults. May be
    used by several threads.
    """

    def __init__(self) -> None:
        self._free: deque[Bytes] = deque()

    def copy_of(self, part: Bytes) -> Bytes:
        """Return a copy of ``part`` u8[n]; it is in use while anything refers to its memory."""
        size = len(part)
        if size < _SMALL:
            return part.copy()
        memory = self._take(size)
        # Of its memoryview: views of an array that owns its memory refer to that array only.
        copy = np.frombuffer(memory.data, np.uint8, size)
        # A weak reference, so that a batch that is kept for long keeps no more than its own memory.
        weakref.finalize(copy, _give_back, weakref.ref(self), memory).atexit = False
        copy[:] = part
        return copy

    def give_back(self, memory: Bytes) -> None:
        """Keep ``memory``, which is not used any more, and no more than 64 MiB with it."""
        # Without a lock: this may run wherever the last reference to a batch goes, also in here.
        self._free.append(memory)
        with contextlib.suppress(IndexError):
            while sum(map(len, self._free.copy())) > _KEPT:
                self._free.popleft()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle to one without memory, for a worker that is spawned."""
        return Buffers, ()

    def _take(self, size: int) -> Bytes:
        """Return memory of ``size`` bytes, and of no more than twice as many."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread took it
                break
            if size <= len(memory) <= 2 * size:
                return memory
            self._free.appendleft(memory)
        return np.empty(size, np.uint8)


def _give_back(to: weakref.ref[Buffers], memory: Bytes) -> None:
    buffers = to()
    if buffers is not None:
        buffers.give_back(memory)
