"""When a server is passed by, because it failed or was slow, and when it is tried again."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable

import numpy as np

from stoker.shared import SharedArray

_ROWS = 64
_POINTS, _UNTIL, _PAUSE, _TRIPS = range(4)
_LIMIT = 3  # points: an error or a slow answer is one, an answer that did not come is three
_FIRST, _LONGEST = 1.0, 30.0  # seconds
_PROBE = 2.0  # seconds that whoever probes has before another one may


class Breakers:
    """A breaker per server name, shared by all processes of a job on one machine.

    Closed, a server is used. :data:`_LIMIT` points in a row open it, and it is passed by for a
    pause of about a second, twice as long each time, half a minute at most, and never the same
    for any two, so that jobs do not return together. When the pause is over one process probes:
    if the server answers the breaker closes. Names are told apart by a hash of 64 values: two that
    collide share a breaker. Nothing here waits or takes a lock; racing processes may probe twice.
    ``clock`` is one that all processes of a machine agree on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = SharedArray.create((_ROWS, 4), np.float64, name="stoker-pool-breakers")
        self._clock = clock

    def is_open(self, name: str) -> bool:
        """Whether the server is to be passed by."""
        return bool(self._row(name)[_UNTIL])

    def failed(self, name: str, *, is_late: bool = False) -> None:
        """Note an error of the server, or that its answer did not come in time."""
        row = self._row(name)
        row[_POINTS] += _LIMIT if is_late else 1
        if row[_POINTS] >= _LIMIT and not row[_UNTIL]:
            self.trip(name)

    def answered(self, name: str, *, is_slow: bool = False) -> None:
        """Note an answer; one that took more than half of its time counts against the server."""
        if is_slow:
            self.failed(name)
            return
        row = self._row(name)
        if not row[_UNTIL]:
            row[_POINTS], row[_PAUSE] = 0.0, 0.0

    def trip(self, name: str) -> None:
        """Pass the server by, from now on for a pause."""
        row = self._row(name)
        row[_PAUSE] = min(_LONGEST, max(_FIRST, 2 * row[_PAUSE]))
        row[_TRIPS] += 1
        row[_UNTIL] = self._clock() + row[_PAUSE] * random.uniform(0.5, 1.5)

    def may_probe(self, name: str) -> bool:
        """Whether the caller shall find out now if the server is back."""
        row = self._row(name)
        now = self._clock()
        if not row[_UNTIL] or now < row[_UNTIL]:
            return False
        row[_UNTIL] = now + _PROBE
        return True

    def close(self, name: str) -> None:
        """Use the server again; the next pause is a longer one, unless it proves itself."""
        row = self._row(name)
        row[_POINTS], row[_UNTIL] = 0.0, 0.0

    @property
    def open_count(self) -> int:
        """How many servers are passed by now."""
        return int(np.count_nonzero(self._table.array[:, _UNTIL]))

    @property
    def trips(self) -> int:
        """How often a server began to be passed by."""
        return int(self._table.array[:, _TRIPS].sum())

    def _row(self, name: str) -> np.ndarray:
        row: np.ndarray = self._table.array[zlib.crc32(name.encode()) % _ROWS]
        return row
