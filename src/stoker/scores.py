"""What training has learned about each sample: one row per sample, in shared memory."""

from __future__ import annotations

from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.shared import SharedArray

Row = TypeVar("Row", np.float64, np.int64)


class Scores:
    """Score, last step and number of observations of every sample.

    The arrays live in shared memory, so a pickled copy in a spawned worker, or a forked child,
    sees the same rows and costs no memory of its own. Written by one process, through
    ``importance``; any process may read. A reader that wants values that do not move under it
    takes a :meth:`snapshot`. Not locked: a row read while it is written may mix two updates.
    """

    def __init__(self, num_samples: int) -> None:
        """Allocate ``num_samples`` rows; ConfigError unless it is a positive integer."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, (int, np.integer)):
            raise ConfigError(f"num_samples={num_samples!r} is refused: give an integer")
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is refused: give at least 1 sample")
        size = (int(num_samples),)
        self._values = SharedArray.create(size, np.float64, name="scores.values")
        self._last = SharedArray.create(size, np.int64, name="scores.last")
        self._seen = SharedArray.create(size, np.int64, name="scores.seen")
        self._frozen = False
        self._last.array.fill(-1)

    def __len__(self) -> int:
        return len(self._values.array)

    @property
    def values(self) -> NDArray[np.float64]:
        """f64[N], the latest score; 0 for a sample not seen yet. Read-only view."""
        return _read_only(self._values.array)

    @property
    def last(self) -> NDArray[np.int64]:
        """i64[N], the step of the latest observation; -1 for none. Read-only view."""
        return _read_only(self._last.array)

    @property
    def seen(self) -> NDArray[np.int64]:
        """i64[N], the number of observations. Read-only view."""
        return _read_only(self._seen.array)

    def update(self, ids: ArrayLike, values: ArrayLike, step: int) -> None:
        """Store f64[n] ``values`` for u32[n] ``ids``, observed at ``step``.

        An id that comes twice counts twice and keeps its later value. Raises ConfigError, and
        changes nothing, for ids out of range, lengths that differ, values that are not finite,
        or a snapshot.
        """
        if self._frozen:
            raise ConfigError("this is a snapshot of scores: update the Scores it was taken from")
        rows, new = self._rows(ids), np.asarray(values, dtype=np.float64)
        if new.shape != rows.shape:
            raise ConfigError(f"{new.shape} values for {rows.shape} ids: give one for each")
        if not np.isfinite(new).all():
            wrong = int(np.flatnonzero(~np.isfinite(new))[0])
            raise ConfigError(
                f"score {new[wrong]} of id {rows[wrong]} is not finite: leave that sample out"
            )
        self._values.array[rows] = new
        self._last.array[rows] = step
        np.add.at(self._seen.array, rows, 1)

    def restore(self, values: ArrayLike, last: ArrayLike, seen: ArrayLike) -> None:
        """Put f64[N], i64[N] and i64[N] of an earlier run in the place of all rows.

        Raises ConfigError, and changes nothing, for other lengths, values that are not finite,
        or a snapshot.
        """
        if self._frozen:
            raise ConfigError("this is a snapshot of scores: restore the Scores it was taken from")
        given = [np.asarray(rows) for rows in (values, last, seen)]
        for rows in given:
            if rows.shape != (len(self),) or not np.isfinite(rows).all():
                raise ConfigError(
                    f"rows of shape {rows.shape} are refused: give {len(self)} finite numbers"
                )
        for memory, rows in zip((self._values, self._last, self._seen), given, strict=True):
            memory.array[:] = rows

    def snapshot(self) -> Self:
        """Return an independent copy that refuses updates; plans are made from one."""
        copy = type(self).__new__(type(self))
        copy._values = SharedArray.copy_of(self._values.array)
        copy._last = SharedArray.copy_of(self._last.array)
        copy._seen = SharedArray.copy_of(self._seen.array)
        copy._frozen = True
        return copy

    def _rows(self, ids: ArrayLike) -> NDArray[np.int64]:
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"ids of shape {given.shape}, {given.dtype} are refused: give u32[n]")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < len(self):
            wrong = given[(given < 0) | (given >= len(self))][0]
            raise ConfigError(f"id {wrong} is out of range: give ids from 0 to {len(self) - 1}")
        return given.astype(np.int64)


def _read_only(array: NDArray[Row]) -> NDArray[Row]:
    view = array.view()
    view.flags.writeable = False
    return view
