"""What the ranks of a job can say to each other, and the scores that they so agree on."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.scores import Scores

_COLUMNS = ("<f8", "<i8", "<i8", "<u4")
"""Of a message: values, last steps, observations, ids. The widest first: all are aligned."""

_ROW = sum(np.dtype(column).itemsize for column in _COLUMNS)


class Collective(Protocol):
    """The ranks of a job; each must call :meth:`gather` as often as the others."""

    rank: int
    world_size: int

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays ``[n]`` that the ranks gave, by rank; of one dtype, of any lengths.

        Raises :class:`~stoker.errors.RanksUnavailable` when one of them does not answer.
        """
        ...


class Alone:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the array by itself."""
        return [rows]


def exchange(scores: Scores, agreed: Scores, ranks: Collective) -> None:
    """Make ``scores`` the same on all ranks, given what all of them ``agreed`` on before.

    Only rows observed since then travel, 28 bytes each. Of a sample that several ranks observed,
    the score of the latest step counts, and of the highest rank where steps are equal; its
    observations add up. History, volatile samples and ``ready`` are left as they are: every rank
    derives them from the same rows. Every rank must call this. Raises
    :class:`~stoker.errors.RanksUnavailable` when a rank does not answer.
    """
    if ranks.world_size == 1:
        return
    ids = np.flatnonzero(scores.seen != agreed.seen)
    own = scores.values[ids], scores.last[ids], scores.seen[ids] - agreed.seen[ids], ids
    values, last, seen = agreed.values.copy(), agreed.last.copy(), agreed.seen.copy()
    latest = np.full(len(scores), np.iinfo(np.int64).min)
    for message in ranks.gather(_pack(own)):
        new_values, steps, times, rows = _unpack(message)
        seen[rows] += times  # a rank names no row twice
        counts = steps >= latest[rows]
        rows, steps = rows[counts], steps[counts]
        values[rows] = new_values[counts]
        last[rows] = latest[rows] = steps
    scores.restore(**{**scores.arrays(), "values": values, "last": last, "seen": seen})


def _pack(columns: tuple[NDArray[Any], ...]) -> NDArray[np.uint8]:
    """Return the columns ``[n]`` one behind the other, as bytes."""
    parts = [row.astype(kind).view(np.uint8) for row, kind in zip(columns, _COLUMNS, strict=True)]
    return np.concatenate(parts)


def _unpack(message: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return the columns that :func:`_pack` was given."""
    count = len(message) // _ROW
    columns: list[NDArray[Any]] = []
    begin = 0
    for kind in _COLUMNS:
        end = begin + count * np.dtype(kind).itemsize
        columns.append(message[begin:end].view(kind))
        begin = end
    return columns
