"""How fast a job trains where data is free: measured in the running job, when somebody asks."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from statistics import median
from typing import Any, Generic, TypeVar

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
_T = TypeVar("_T")


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
