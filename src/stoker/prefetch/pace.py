"""How many reads may be under way at once."""

from __future__ import annotations

_GROWTH = 1.5
_GAIN = 1.05  # throughput must grow at least so much for a higher limit to be kept
_PATIENCE = 10  # intervals between two attempts to grow
_RECOVERY = 10  # intervals of quiet after the storage asked for less


class Pace:
    """A limit on concurrency that climbs while throughput climbs, and halves when throttled.

    ``least`` and ``most`` bound it; it starts at ``least``. ``interval`` seconds of reading with
    the limit reached make one measurement. It never looks at a clock itself: the caller says how
    late it is. Not thread-safe.
    """

    def __init__(self, least: int = 4, most: int = 64, interval: float = 0.1) -> None:
        self.limit = least
        """Reads that may be under way now."""
        self._least, self._most, self._interval = least, most, interval
        self._before: tuple[int, float] | None = None  # limit and rate before the attempt under way
        self._quiet = 0  # intervals to wait before the next attempt
        self._bytes = 0
        self._began: float | None = None

    def done(self, num_bytes: int, now: float, saturated: bool) -> None:
        """Note a finished read; ``saturated``: the limit was what held others back."""
        if not saturated:
            self._began = None
            return
        if self._began is None:
            self._began, self._bytes = now, 0
            return
        self._bytes += num_bytes
        if now - self._began >= self._interval:
            self._measured(self._bytes / (now - self._began))
            self._began, self._bytes = now, 0

    def throttled(self) -> None:
        """Note that the storage refused or gave up: back off, and do not try again soon."""
        self.limit = max(self._least, self.limit // 2)
        self._before, self._quiet, self._began = None, _RECOVERY, None

    def _measured(self, rate: float) -> None:
        if self._quiet > 0:
            self._quiet -= 1
        elif self._before is None or rate > self._before[1] * _GAIN:
            self._before = self.limit, rate
            self.limit = min(self._most, int(self.limit * _GROWTH) + 1)
        else:
            self.limit = self._before[0]
            self._before, self._quiet = None, _PATIENCE
