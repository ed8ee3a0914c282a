"""Who gets room: tiers in order, bytes reserved before they are written, failing tiers rested."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

FIRST_REST = 5.0
"""Seconds of a tier's first rest; doubles with each failure in a row."""
_LONGEST_REST = 600.0


class Room:
    """Bytes of one tier: ``used`` of at most ``quota``. See :class:`Rooms`, which guards it."""

    def __init__(self, quota: int, used: int) -> None:
        self.quota, self.used = quota, used
        self.rests_until = 0.0
        self.failures = 0


class Rooms:
    """The rooms of all tiers, in the order in which they are tried. Safe in any thread.

    ``quotas`` and ``used`` are bytes, one a tier; ``clock`` gives seconds.
    """

    def __init__(
        self, quotas: list[int], used: list[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rooms = [Room(quota, has) for quota, has in zip(quotas, used, strict=True)]
        self._clock = clock
        self._lock = threading.Lock()

    def reserve(self, size: int) -> int | None:
        """Take ``size`` bytes of the first tier that has them; return its number, None if none."""
        with self._lock:
            now = self._clock()
            for number, room in enumerate(self._rooms):
                if room.rests_until <= now and room.used + size <= room.quota:
                    room.used += size
                    return number
            return None

    def free(self, tier: int, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._rooms[tier].used -= size

    def rests(self, tier: int) -> bool:
        """Whether a tier is not used now, since it failed."""
        with self._lock:
            return self._rooms[tier].rests_until > self._clock()

    def any_rests(self) -> bool:
        """Whether a tier rests that will be used again."""
        with self._lock:
            now = self._clock()
            return any(now < room.rests_until < math.inf for room in self._rooms)

    def close(self, tier: int) -> None:
        """Never use a tier again."""
        with self._lock:
            self._rooms[tier].rests_until = math.inf

    def is_closed(self, tier: int) -> bool:
        """Whether a tier is never used again."""
        with self._lock:
            return self._rooms[tier].rests_until == math.inf

    def failed(self, tier: int) -> None:
        """Let a tier rest after a failure of its own."""
        with self._lock:
            room = self._rooms[tier]
            if room.rests_until <= self._clock():  # copies that fail together count once
                room.rests_until = self._clock() + min(_LONGEST_REST, FIRST_REST * 2**room.failures)
                room.failures += 1

    def worked(self, tier: int) -> None:
        """Forget a tier's failures."""
        with self._lock:
            self._rooms[tier].failures = 0

    def used(self) -> list[int]:
        """Return the bytes taken of each tier, reservations included."""
        with self._lock:
            return [room.used for room in self._rooms]
