"""What the jobs of some names, or of a user, may have of a node, as its operator says."""

from __future__ import annotations

import hashlib
import math
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.jobs.partition import Floats, fair_shares
from stoker.node.bandwidth import LEAST_WEIGHT, MOST_WEIGHT, FetchShare
from stoker.types import parse_bytes


@dataclass(frozen=True)
class Quota:
    """What the caches have, all of them together, that jobs of some names made, or of a user.

    ``memory`` is theirs by right. Up to ``most`` they use what others leave, and give it back;
    without it ``memory`` is also the most that they have. ``disk`` and ``disk_most`` likewise.

    Raises :class:`~stoker.errors.ConfigError` for values out of range.
    """

    jobs: str
    """Their names, as a pattern of the shell: ``ann-*``; or ``user=``, and a name or number."""
    memory: int | None = None
    """Bytes in memory, with their bookkeeping; None: no bound of their own."""
    disk: int | None = None
    """Bytes of disk, likewise."""
    priority: int = 0
    """Of jobs that wait, those of the highest are served first; of idle caches, those of the lowest
    are dropped first. Jobs without a quota have 0."""
    weight: float | None = None
    """Of the fetch bandwidth, for these jobs together, in the place of their own weights; and of
    memory that others leave."""
    most: int | None = None
    """Bytes in memory, with what is borrowed; None: nothing is."""
    disk_most: int | None = None
    """Bytes of disk, likewise."""

    def __post_init__(self) -> None:
        if self.jobs in ("", _USER):
            raise ConfigError(
                "a quota names no jobs and no user: give NAMES:memory=SIZE, like ann-*, or "
                "user=ann:memory=SIZE"
            )
        if self.jobs.startswith(_USER):
            _ = self.user
        for right, most in (("memory", "most"), ("disk", "disk_most")):
            own, bound = getattr(self, right), getattr(self, most)
            if bound is not None and bound < (own or 0):
                raise ConfigError(
                    f"{most}={bound} of {self.jobs!r} is less than its {right}={own}: give what "
                    "they have together with what they borrow"
                )
        for name in ("memory", "disk", "most", "disk_most"):
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
        """Return what ``NAMES:memory=SIZE,most=SIZE,disk=SIZE,disk_most=SIZE,...`` says.

        Further parts are ``priority=N`` and ``weight=W``. Parts may be left out.
        """
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
                    f"quota {text!r} is invalid at {part!r}: give NAMES:memory=SIZE,most=SIZE,"
                    "disk=SIZE,disk_most=SIZE,priority=N,weight=W, or some of these"
                ) from None
        return cls(jobs, **values)

    @cached_property
    def user(self) -> int | None:
        """The number of the user it is for; None: it is for jobs by their names."""
        if not self.jobs.startswith(_USER):
            return None
        name = self.jobs.removeprefix(_USER)
        try:
            return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
        except KeyError:
            raise ConfigError(
                f"user {name!r} of a quota does not exist: see `getent passwd`"
            ) from None

    @property
    def whose(self) -> str:
        """Whom it is for, in words."""
        who = self.jobs.removeprefix(_USER)
        return f"jobs named {who}" if who == self.jobs else f"user {who}"

    @property
    def bound(self) -> float:
        """Bytes in memory that they have at most; inf: no bound of their own."""
        bound = self.memory if self.most is None else self.most
        return math.inf if bound is None else bound

    @cached_property
    def on_disk(self) -> Quota:
        """The same of disk, as if that was memory."""
        return replace(self, memory=self.disk, most=self.disk_most)

    @property
    def flow(self) -> int:
        """What stands for these jobs where fetch bandwidth is shared; never 0."""
        return int.from_bytes(hashlib.sha256(self.jobs.encode()).digest()[:8], "little") | 1


_USER = "user="
_KINDS: Mapping[str, Callable[[str], int | float]] = {
    "memory": lambda text: parse_bytes(text, name="memory"),
    "most": lambda text: parse_bytes(text, name="most"),
    "disk": lambda text: parse_bytes(text, name="disk"),
    "disk_most": lambda text: parse_bytes(text, name="disk_most"),
    "priority": int,
    "weight": float,
}


def quota_for(job: str, user: int, quotas: Iterable[Quota]) -> Quota | None:
    """Return the first that is for a user, or for jobs of that name; None if there is none."""
    for quota in quotas:
        if fnmatchcase(job, quota.jobs) if quota.user is None else quota.user == user:
            return quota
    return None


def quota_of_user(user: int, quotas: Iterable[Quota]) -> Quota | None:
    """Return the first that is for a user, whatever his jobs are called; None if there is none."""
    return next((quota for quota in quotas if quota.user == user), None)


def flow_of(job: str, user: int, quotas: Iterable[Quota]) -> FetchShare | None:
    """Return what stands for a job where fetch bandwidth is shared; None: it stands for itself."""
    quota = quota_for(job, user, quotas)
    return FetchShare(quota.flow, quota.weight) if quota is not None and quota.weight else None


@dataclass(frozen=True)
class Claimant:
    """A cache that needs memory, or disk; bytes, with its bookkeeping."""

    quota: Quota | None
    least: float
    """What it takes without a sample."""
    has: float
    wants: float
    """What it would use now."""
    is_idle: bool = False
    """Whether no job uses it at the moment."""

    @property
    def keeps(self) -> bool:
        """Whether it is not one that borrows: then others do not borrow what it has."""
        return self.quota is None or self.quota.most is None


def divide(memory: float, caches: Sequence[Claimant]) -> Floats:
    """Return f64[n], the bytes that each cache should have of ``memory``.

    First each quota gets what is its by right, as far as its caches want it. Then those that want
    more get what is left, quotas of a higher priority before others and by their weights, up to
    what they may have; caches that are not of such as borrow keep what they have, before that.
    What none wants stays where it is, also with caches that are idle.
    """
    return _Division(memory, caches).given


class _Division:
    def __init__(self, memory: float, caches: Sequence[Claimant]) -> None:
        quotas: list[Quota | None] = []
        group = []  # of each cache: all of a quota, or it alone
        for each in caches:
            if each.quota is None or each.quota not in quotas:
                quotas.append(each.quota)
            group.append(len(quotas) - 1 if each.quota is None else quotas.index(each.quota))
        self._group = np.array(group, np.intp)
        self._count = len(quotas)
        self.given = np.array([float(each.least) for each in caches])
        self._left = max(0.0, memory - float(self.given.sum()))
        has, wants = (np.array([float(getattr(c, k)) for c in caches]) for k in ("has", "wants"))
        wants[[each.is_idle for each in caches]] = 0.0
        kept = np.where([each.keeps for each in caches], np.minimum(has, wants), 0.0)
        rights = np.array([float(q.memory or 0) if q else 0.0 for q in quotas])
        bounds = np.array([q.bound if q else math.inf for q in quotas])
        weights = np.array([(q.weight or 1.0) if q else 1.0 for q in quotas])
        for goals in (kept, wants):
            self._give(goals, rights, np.maximum(rights, 1.0))
        priority = np.array([q.priority if q else 0 for q in quotas])
        for level in sorted(set(priority.tolist()), reverse=True):
            for goals in (kept, wants):
                self._give(goals, np.where(priority == level, bounds, 0.0), weights)
        self._give(has, bounds, weights)

    def _give(self, goals: Floats, bounds: Floats, weights: Floats) -> None:
        """Bring caches nearer to their ``goals`` f64[n], groups up to ``bounds`` f64[groups]."""
        lacks = np.maximum(goals - self.given, 0.0)
        have, want = (np.bincount(self._group, x, self._count) for x in (self.given, lacks))
        shares = fair_shares(weights, np.minimum(want, np.maximum(bounds - have, 0.0)), self._left)
        for number in np.flatnonzero(shares > 0).tolist():
            own: NDArray[np.intp] = np.flatnonzero(self._group == number)
            self.given[own] += fair_shares(np.ones(len(own)), lacks[own], float(shares[number]))
        self._left = max(0.0, self._left - float(shares.sum()))
