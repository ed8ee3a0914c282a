"""The board of the jobs that share one cache, in memory that they share."""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.jobs.board import SLOTS, Board, Kind, layout
from stoker.store import unforked
from stoker.store.ofd import is_locked, try_lock, unlock
from stoker.store.shared_arrays import SharedArrays, open_arrays
from stoker.store.unforked import Descriptor

PREFIX = "jobs"
"""How the name begins under which the arrays are shared."""

_GLANCE = 0.1  # seconds between two looks who lives
_DOOR = SLOTS  # the byte that is locked while a slot is taken
_PATIENCE = 1.0  # seconds for another job that is just coming in


class JobTable:
    """Who shares the cache ``key`` of ``num_samples`` samples, and what they say of themselves.

    Each process that takes a slot holds a lock for it that ends with the process however that
    ends, so that a dead job stops counting at once, and its slot can be taken by another. Forked
    children hold none. ``board`` stays readable after :meth:`close`. Also a context manager.

    One thread calls :meth:`take`. Raises :class:`OSError` where the memory's descriptor cannot be
    opened anew (no ``/proc``), and what :func:`~stoker.store.shared_arrays.open_arrays` does.
    """

    def __init__(self, key: str, num_samples: int) -> None:
        self._arrays = open_arrays(f"{PREFIX} {key}", layout(num_samples))
        try:
            self._locks = _reopened(self._arrays)
        except BaseException:
            self._arrays.close()
            raise
        self.is_shared = self._arrays.shared
        """False if other jobs cannot find it."""
        self.slot: int | None = None
        """The slot of this process, once it has taken one."""
        self._seen = -np.inf
        self._live = np.zeros(SLOTS, np.bool_)
        self._tokens = np.zeros(SLOTS, np.uint64)  # of the rows when they were looked at
        arrays: dict[str, NDArray[Any]] = {
            name: shared.array for name, shared in self._arrays.arrays.items()
        }
        self.board = Board(arrays, self.live, time.monotonic)

    def take(self, token: int, kind: Kind, name: str, threshold: float) -> int | None:
        """Take a slot for the job ``token``, and return it; None when all are taken."""
        deadline = time.monotonic() + _PATIENCE
        while not try_lock(self._locks.fileno(), start=_DOOR, length=1):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        try:
            for slot in range(SLOTS):
                if try_lock(self._locks.fileno(), start=slot, length=1):
                    self.slot, self._seen = slot, -np.inf
                    self.board.enter(slot, token, kind, name, os.getpid(), threshold)
                    self._seen = -np.inf
                    return slot
            return None
        finally:
            unlock(self._locks.fileno(), start=_DOOR, length=1)

    def live(self) -> NDArray[np.bool_]:
        """Return bool[SLOTS], whose process lives.

        Who comes or leaves is seen at once, a death within a tenth of a second.
        """
        now, tokens = time.monotonic(), self.board.jobs["token"].copy()
        if now - self._seen >= _GLANCE or (tokens != self._tokens).any():
            self._seen, self._tokens = now, tokens
            for slot in np.flatnonzero(tokens).tolist():
                self._live[slot] = slot == self.slot or self._is_held(slot)
        return self._live & (tokens > 0)

    def close(self) -> None:
        """Leave; may be called again."""
        if self.slot is not None and self._locks.fileno() >= 0:
            self.board.leave(self.slot)
        self.slot = None
        unforked.drop(self._locks)
        self._arrays.close()

    def __enter__(self) -> JobTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_held(self, slot: int) -> bool:
        with contextlib.suppress(OSError):
            return is_locked(self._locks.fileno(), start=slot, length=1)
        return False


def _reopened(arrays: SharedArrays) -> Descriptor:
    """Return a description of the memory's own, so that its locks are this process's alone."""
    path = f"/proc/self/fd/{arrays['jobs'].fileno()}"
    with unforked.no_fork:
        return unforked.keep(Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC)))
