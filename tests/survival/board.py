"""What the members of a fleet write down while they run, for the test to read at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from stoker.shared import SharedArray


class Field(IntEnum):
    """Column of the board."""

    BEATS = 0  # rounds that were finished
    READ = 1  # samples found
    READ_BYTES = 2
    PUT = 3  # samples admitted
    WRONG = 4  # samples with other bytes than their own
    SLOWEST = 5  # longest call so far, ns, without the time it waited for a CPU
    STOPS = 6  # written by the test before it stops and before it continues the member


class Board:
    """One row of counters for each place in a fleet; a member that takes a place over goes on."""

    def __init__(self, places: int) -> None:
        self._shared = SharedArray.create((places + 1, len(Field)), "i8")

    def row(self, place: int) -> Row:
        return Row(self, place)

    def get(self, place: int, field: Field) -> int:
        return int(self._shared.array[place, field])

    def add(self, place: int, field: Field, value: int) -> None:
        self._shared.array[place, field] += value

    def raise_to(self, place: int, field: Field, value: int) -> None:
        self._shared.array[place, field] = max(value, self.get(place, field))

    def total(self, field: Field) -> int:
        return int(self._shared.array[:-1, field].sum())

    def most(self, field: Field) -> int:
        return int(self._shared.array[:-1, field].max())

    def ring_off(self) -> None:
        """Ask all members to end."""
        self._shared.array[-1, 0] = 1

    @property
    def over(self) -> bool:
        return bool(self._shared.array[-1, 0])


class Row:
    """One member's side of the board."""

    def __init__(self, board: Board, place: int) -> None:
        self._board, self._place = board, place
        # The kernel's own account of this thread: ns on a CPU, ns runnable without one.
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    @property
    def over(self) -> bool:
        return self._board.over

    def add(self, field: Field, value: int = 1) -> None:
        self._board.add(self._place, field, value)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note how long the block takes, unless the test stops this process meanwhile."""
        stops = self._board.get(self._place, Field.STOPS)
        delayed, begin = self._delay(), time.monotonic_ns()
        yield
        took = time.monotonic_ns() - begin - (self._delay() - delayed)
        if self._board.get(self._place, Field.STOPS) == stops:
            self._board.raise_to(self._place, Field.SLOWEST, took)

    def _delay(self) -> int:
        return int(os.pread(self._schedstat, 64, 0).split()[1])
