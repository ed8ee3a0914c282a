"""What the jobs of some names may have of a node, as its operator says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stoker.errors import ConfigError
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

    def __post_init__(self) -> None:
        if not self.jobs:
            raise ConfigError("a quota has no names of jobs: give NAMES:memory=SIZE, like ann-*")
        for name in ("memory", "disk"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value} of {self.jobs!r} is invalid: give 0 or more")

    @classmethod
    def parse(cls, text: str) -> Quota:
        """Return what ``NAMES:memory=SIZE,disk=SIZE,priority=N`` says; each part may be absent."""
        jobs, _, parts = text.rpartition(":")
        values: dict[str, int] = {}
        for part in parts.split(","):
            name, _, value = part.partition("=")
            try:
                if name not in ("memory", "disk", "priority") or name in values:
                    raise ValueError
                is_size = name != "priority"
                values[name] = parse_bytes(value, name=f"quota {text!r}") if is_size else int(value)
            except ValueError:
                raise ConfigError(
                    f"quota {text!r} is invalid at {part!r}: give "
                    "NAMES:memory=SIZE,disk=SIZE,priority=N, or some of these"
                ) from None
        return cls(jobs, **values)


def quota_for(job: str, quotas: Iterable[Quota]) -> Quota | None:
    """Return the first whose pattern the job's name matches; None if there is none."""
    return next((quota for quota in quotas if fnmatchcase(job, quota.jobs)), None)
