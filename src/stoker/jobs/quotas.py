"""What the jobs of some names may have of a node, as its operator says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from stoker.errors import ConfigError
from stoker.node.bandwidth import LEAST_WEIGHT, MOST_WEIGHT
from stoker.types import parse_bytes


@dataclass(frozen=True)
class Quota:
    """Bounds for the caches that jobs of some names made, all of them together.

    Raises :class:`~stoker.errors.ConfigError` for values out of range.
    """

    jobs: str
    """Their names, as a pattern of the shell: ``ann-*``."""
    memory: int | None = None
    """Bytes in memory, with their bookkeeping; None: no bound of their own."""
    disk: int | None = None
    """Bytes of disk, likewise."""
    priority: int = 0
    """Of jobs that wait, those of the highest are served first; of idle caches, those of the lowest
    are dropped first. Jobs without a quota have 0."""
    weight: float | None = None
    """Of the fetch bandwidth, for these jobs together, in the place of their own weights."""

    def __post_init__(self) -> None:
        if not self.jobs:
            raise ConfigError("a quota has no names of jobs: give NAMES:memory=SIZE, like ann-*")
        for name in ("memory", "disk"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value} of {self.jobs!r} is invalid: give 0 or more")
        if self.weight is not None and not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"weight={self.weight} of {self.jobs!r} is invalid: give {LEAST_WEIGHT} to "
                f"{MOST_WEIGHT:,}"
            )

    @classmethod
    def parse(cls, text: str) -> Quota:
        """Return what ``NAMES:memory=SIZE,disk=SIZE,priority=N,weight=W`` or a part of it says."""
        jobs, _, parts = text.rpartition(":")
        values: dict[str, Any] = {}
        for part in parts.split(","):
            name, _, value = part.partition("=")
            try:
                if name in values:
                    raise KeyError
                values[name] = _KINDS[name](value)
            except (KeyError, ValueError):
                raise ConfigError(
                    f"quota {text!r} is invalid at {part!r}: give NAMES:memory=SIZE,disk=SIZE,"
                    "priority=N,weight=W, or some of these"
                ) from None
        return cls(jobs, **values)

    @property
    def flow(self) -> int:
        """What stands for these jobs where fetch bandwidth is shared; never 0."""
        return int.from_bytes(hashlib.sha256(self.jobs.encode()).digest()[:8], "little") | 1


_KINDS: Mapping[str, Callable[[str], int | float]] = {
    "memory": lambda text: parse_bytes(text, name="memory"),
    "disk": lambda text: parse_bytes(text, name="disk"),
    "priority": int,
    "weight": float,
}


def quota_for(job: str, quotas: Iterable[Quota]) -> Quota | None:
    """Return the first whose pattern the job's name matches; None if there is none."""
    return next((quota for quota in quotas if fnmatchcase(job, quota.jobs)), None)
