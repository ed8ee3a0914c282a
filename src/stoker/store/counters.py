"""Counters that many processes write and any process may sum."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.node import descriptors
from stoker.node.descriptors import Descriptor
from stoker.node.locks import try_lock
from stoker.shared import SharedArray

_LIVE: weakref.WeakSet[Counters] = weakref.WeakSet()


class Counters:
    """Named sums, ``f64``, one row of shared memory per process, so that no process waits.

    Each process takes a row at its first :meth:`add`, held by a lock on that row's byte. The
    lock ends with the process and the counts stay; the next owner of the row adds to them.
    Safe in any thread; forked children and processes that receive it by pickling count into
    the same table. A process that finds no free row warns and counts for itself only.
    """

    def __init__(self, fields: Sequence[str], rows: int = 1024) -> None:
        if len(set(fields)) != len(fields) or not fields or rows < 1:
            raise ConfigError(
                f"counters {list(fields)} x {rows} rows: give distinct names, rows >= 1"
            )
        shared = SharedArray.create((rows, len(fields)), np.float64, name="stoker-counters")
        self._set_up(tuple(fields), shared)

    def add(self, **amounts: float) -> None:
        """Add to the named fields. Raises KeyError for a name that is not a field."""
        with self._mutex:
            row = self._row if self._row is not None else self._take_row()
            for name, amount in amounts.items():
                row[self._column[name]] += amount

    def totals(self) -> dict[str, float]:
        """Return each field summed over all processes, including ended ones."""
        sums = self._table.array.sum(axis=0) + self._private
        return dict(zip(self._column, sums.tolist(), strict=True))

    def _set_up(self, fields: tuple[str, ...], table: SharedArray) -> None:
        self._table = table
        self._column = {name: column for column, name in enumerate(fields)}
        self._private = np.zeros(len(fields), np.float64)
        self._start()
        _LIVE.add(self)

    def _start(self) -> None:
        self._mutex = threading.Lock()
        self._row: NDArray[np.float64] | None = None
        self._lock: weakref.finalize[[Descriptor], Counters] | None = None

    def _take_row(self) -> NDArray[np.float64]:
        self._row = self._private
        if self._table.is_private:
            return self._row
        try:
            # Reopened: a duplicate would share its locks with every other process.
            own = descriptors.reopen(self._table.fileno())
        except OSError as error:
            self._warn(str(error))
            return self._row
        self._lock = weakref.finalize(self, descriptors.drop, own)
        table: NDArray[np.float64] = self._table.array
        for number in range(len(table)):
            if try_lock(own.fileno(), start=number, length=1):
                self._row = table[number]
                return self._row
        self._warn(f"all {len(table)} rows are taken")
        return self._row

    @staticmethod
    def _warn(why: str) -> None:
        message = f"this process is missing from the shared statistics: {why}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": tuple(self._column), "table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state["fields"], state["table"])


def _restart_in_child() -> None:
    for counters in list(_LIVE):
        if counters._lock is not None:
            counters._lock()  # else the parent's row would stay taken as long as the child lives
        counters._private[:] = 0
        counters._start()


os.register_at_fork(after_in_child=_restart_in_child)
