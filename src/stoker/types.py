"""Small values that every part shares: the outcome of an access, and sizes in bytes."""

from __future__ import annotations

import math
import os
import re
from enum import IntEnum
from typing import Any, NamedTuple

from stoker.errors import ConfigError


class Outcome(IntEnum):
    """How one access was served; every access ends as exactly one of these."""

    HIT = 0
    """Served from a copy kept for this use; no source read was caused."""
    SUBSTITUTED = 1
    """Another sample was served in its place."""
    FETCHED = 2
    """The source was read, by prefetch or by the worker."""
    PACKAGED = 3
    """Came with a package; neither a hit nor a fetch."""


class FileIdentity(NamedTuple):
    """What tells whether a path still leads to the same, unchanged file or folder on this machine.

    Archives, rsync and builds that normalise times restore ``mtime``; nothing but the kernel sets
    ``ctime``. Another tree mounted at the same path has another device or inode. Device numbers
    differ between machines and mounts, so an identity is never compared across them.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity that a ``stat`` result tells."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z%]*)\s*")


def parse_bytes(value: int | float | str, *, of: int | None = None, name: str = "cache") -> int:
    """Return a size in bytes from ``8 << 30``, ``"8GiB"``, ``"500 MB"`` or ``"20%"``.

    ``of`` is what a percentage refers to, in bytes. ``KiB`` and ``K`` are binary, ``KB`` is
    decimal. Raises :class:`ConfigError`, which names ``name`` and the value, for anything
    negative, not finite, above 100 % or not a size, such as the float .2.
    """
    hint = f'give {name} in bytes, like 8 << 30 or "8GiB", or as a share, like "20%"'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{name}={value!r} is not a size: {hint}")
    if not isinstance(value, str):
        is_share = isinstance(value, float) and 0 < value <= 1  # or so its writer thought
        if not math.isfinite(value) or value < 0 or is_share:
            raise ConfigError(f"{name}={value!r} is not a size: {hint}")
        return int(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ConfigError(f"{name}={value!r} is not a size: {hint}")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if of is None:
            raise ConfigError(f"{name}={value!r} is a share of nothing known: {hint}")
        if number > 100:
            raise ConfigError(f"{name}={value!r} is more than the whole data set: use at most 100%")
        return int(of * number / 100)
    if unit not in _UNITS:
        raise ConfigError(f"{name}={value!r} has the unknown unit {match[2]!r}: {hint}")
    return int(number * _UNITS[unit])


def format_bytes(value: float) -> str:
    """Return a size in bytes as people read it, like ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def check_members(candidate: Any, kind: str, required: tuple[str, ...], see: str) -> None:
    """Raise :class:`ConfigError` unless ``candidate`` has all ``required`` members of a ``kind``.

    ``see`` names the class that describes them.
    """
    missing = [name for name in required if not hasattr(candidate, name)]
    if missing:
        raise ConfigError(
            f"{type(candidate).__name__} is not a {kind}: it lacks {', '.join(missing)}; see {see}"
        )
