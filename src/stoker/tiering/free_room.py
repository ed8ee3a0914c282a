"""Whether a tier's quota can be had at all: on its file system, and in memory if it lies there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from stoker.errors import CapacityError
from stoker.store.memory_limits import read_memory
from stoker.tiering.tier_dir import TierDir
from stoker.types import format_bytes

_IN_MEMORY = {"tmpfs", "ramfs"}


def check_room(tier: TierDir, quota: int) -> None:
    """Refuse a quota that there is no room for.

    Raises :class:`~stoker.errors.CapacityError` if there never can be, and :class:`OSError` if
    others have taken it just now.
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
