"""Since when storage has not answered: known to all processes that read it through one client."""

from __future__ import annotations

import time
from multiprocessing import context
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.pace import Retry

_ANSWERED, _SINCE, _LATEST = range(3)


class Outage:
    """Whether something has ever answered, and since when everything fails, if it does.

    Children of any start method share it with their parent, so that an outage is one for all of
    them; any other copy knows no more than whether something has answered. Times are of
    ``time.monotonic()``. Thread-safe without a lock: each value is one aligned float, and of two
    writers at one instant either may win.
    """

    def __init__(self) -> None:
        self._hold(SharedArray.create(3, np.float64, "outage"))

    def _hold(self, shared: SharedArray) -> None:
        self.shared: SharedArray | None = shared
        """The memory, f64[3], to give to a process; None in one that was given it."""
        self._values: NDArray[np.float64] = shared.array

    @classmethod
    def over(cls, memory: Any) -> Self:
        """Return the one that lies in ``memory``, a mapping of :attr:`shared`."""
        self = object.__new__(cls)
        self.shared, self._values = None, np.frombuffer(memory, np.float64, 3)
        return self

    def __getstate__(self) -> SharedArray | bool:
        # Memory can be passed on only to a process that is just being started.
        is_passed = self.shared is not None and context.get_spawning_popen() is not None
        return self.shared if is_passed and self.shared is not None else self.has_answered

    def __setstate__(self, state: SharedArray | bool) -> None:
        if isinstance(state, SharedArray):
            self._hold(state)
        else:
            self._hold(SharedArray.create(3, np.float64, "outage"))
            self._values[_ANSWERED] = state

    @property
    def has_answered(self) -> bool:
        """Whether a request was ever answered, if only by an error."""
        return bool(self._values[_ANSWERED])

    def answer(self) -> None:
        """Note that something answered."""
        if not self._values[_ANSWERED]:
            self._values[_ANSWERED] = 1.0

    def end(self) -> None:
        """Note that a request succeeded."""
        self.answer()
        if self._values[_SINCE]:
            self._values[_SINCE] = 0.0

    def fail(self, retry: Retry) -> float:
        """Note that a request failed; return when this outage began.

        One in which nothing has failed for as long as ``retry.deadline`` is another's business.
        """
        now, since = time.monotonic(), float(self._values[_SINCE])
        if not since or now - self._values[_LATEST] > retry.deadline:
            self._values[_SINCE] = since = now
        self._values[_LATEST] = now
        return since

    def limit(self, retry: Retry, since: float, called: float, unreachable: bool) -> float:
        """Return until when a call that began at ``called`` is to be tried again."""
        short = min(retry.unanswered, retry.deadline)
        if unreachable and not self.has_answered:
            return since + short
        limit = since + retry.deadline
        return max(limit, called + short) if called > since else limit
