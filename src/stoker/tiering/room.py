"""Room in tiers: what is promised and used of each, and whether a quota fits at all."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.errors import CapacityError
from stoker.node.memory_limits import read_memory
from stoker.tiering.tier_dir import TierDir
from stoker.types import format_bytes

FIRST_REST = 5.0
"""Seconds of a tier's first pause; doubles with each failure in a row."""
_LONGEST_REST = 600.0
_IN_MEMORY = {"tmpfs", "ramfs"}


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
        """Whether a tier is paused after a failure."""
        with self._lock:
            return self._rooms[tier].rests_until > self._clock()

    def any_rests(self) -> bool:
        """Whether any tier is paused that will be used again."""
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
        """Pause a tier after a failure of its own."""
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
        """Return the bytes used of each tier, including reservations."""
        with self._lock:
            return [room.used for room in self._rooms]


def check_room(tier: TierDir, quota: int) -> None:
    """Raise for a quota that there is no room for.

    Raises :class:`~stoker.errors.CapacityError` if there never can be, and :class:`OSError` if
    other files take the space now.
    """
    found = os.statvfs(tier.path)
    free, where = found.f_bavail * found.f_frsize, "free there"
    if file_system(tier.dev) in _IN_MEMORY and (memory := read_memory().available) < free:
        free, where = memory, "available as memory"
    if quota - tier.used > free:
        message = (
            f"tier {str(tier.path)!r}: {format_bytes(quota)} do not fit, {format_bytes(free)} are "
            f"{where} and {format_bytes(tier.used)} in use by copies: give it a smaller size"
        )
        if quota > found.f_blocks * found.f_frsize:
            raise CapacityError(message)
        raise OSError(errno.ENOSPC, message)


def file_system(dev: int, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system with that device number; empty if it is not known."""
    number = f"{os.major(dev)}:{os.minor(dev)}"
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""
