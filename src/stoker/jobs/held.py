"""Caches as the node's service sees them: what each takes of memory or disk, and would use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from stoker.jobs.partition import LONGEST_STEP, are_idle
from stoker.jobs.quotas import Claimant, Quota
from stoker.node.rendezvous import Joined
from stoker.store.arena import Arena, memory_needed, payload_within
from stoker.store.disk import CacheDir, DiskMeta, file_bytes, shrink_unused, spare_bytes

_LEAST_CHANGE = 0.002  # of a cache's size; what is less is left as it is
_MOVING = 2.0  # seconds for which samples are copied out of disk that is given back
_SOON, _STUCK = 0.2, 5.0  # seconds before a disk is asked again that did not change, from and to


class _Patience:
    """Waits ever longer before a disk is asked again that took, or gave back, nothing."""

    def __init__(self) -> None:
        self._pause, self._until = 0.0, 0.0

    def note(self, changed: bool) -> None:
        self._pause = 0.0 if changed else min(_STUCK, max(_SOON, 2 * self._pause))
        self._until = time.monotonic() + self._pause

    def waits(self) -> bool:
        return time.monotonic() < self._until


class Cache(Protocol):
    """What memory or disk is divided among; sizes are bytes of it, with bookkeeping."""

    taken: int
    """What it had when it was looked at last."""
    whole: int
    """With all that may fit."""
    least: int
    """Without a sample."""
    why: str
    """Why it has less than it could."""

    def look(self, now: float) -> None:
        """Note whether it is used, and how full it is."""
        ...

    def claimant(self, quota: Quota | None, now: float) -> Claimant:
        """Return what it asks for. What borrows asks for more as it fills what it has."""
        ...

    def limit(self, size: float) -> None:
        """Let it have so much. Raises StokerError, OSError where that cannot be now."""
        ...

    def is_near(self, size: float) -> bool:
        """Whether it has about so much, and uses it; or can have no other size for now."""
        ...


class _Sizes:
    """What a cache of ``capacity`` bytes of payload takes: ``needed`` says it of any payload."""

    def __init__(self, capacity: int, needed: Callable[[int], int]) -> None:
        self._capacity, self._needed = capacity, needed
        self.whole, self.least = needed(capacity), needed(0)

    def payload_in(self, size: float) -> int:
        """Return the bytes of payload that there is room for in so much, but for rounding."""
        return payload_within(size + 0.5, self._capacity, self._needed)


class Held:
    """An arena that this process has joined, in memory or in a file of the directory ``path``."""

    above: Sequence[Held] = ()
    """Those in memory over one on disk: a job that finds all it needs there is not idle."""

    def __init__(self, joined: Joined[Arena], path: str = "") -> None:
        arena = joined.held
        self.joined, self.path = joined, path
        self.idle_since: float | None = None
        self.why = ""
        self._used = -1  # look-ups and insertions so far
        self._seen = self._looked = time.monotonic()  # when there were more
        self._gap = 0.0  # seconds in which there were none, the longest of late
        self._is_full = False
        self._payload = 0
        self._patience = _Patience()
        self.taken = arena.disk_bytes or arena.memory_bytes
        sizes = arena.num_ids, arena.capacity_bytes, arena.mean_size
        needed = (
            partial(file_bytes, DiskMeta("", *sizes)) if path else partial(memory_needed, *sizes)
        )
        self._sizes = _Sizes(arena.capacity_bytes, needed)
        self.whole, self.least = self._sizes.whole, self._sizes.least

    @property
    def is_alone(self) -> bool:
        """Whether no job holds it."""
        return self.joined.participant.is_alone

    @property
    def is_limited(self) -> bool:
        """Whether less fits than could."""
        return self.joined.held.limit_bytes < self.joined.held.capacity_bytes

    def is_above(self, other: Held) -> bool:
        """Whether it is in memory, of the samples that ``other`` has on disk."""
        own, below = self.joined.said, other.joined.said
        if own is None or below is None:
            return False
        data = below.key.rpartition("-disk-")[0]
        return own.key == data or own.key.startswith(f"{data}-")

    def look(self, now: float) -> None:
        """Note whether it is used, and how full it is."""
        for each in self.above:
            each.look(now)
        stats = self.joined.held.stats()
        used = stats["hits"] + stats["misses"] + stats["inserts"]
        if used != self._used:
            step = self._looked - self._seen
            self._gap = max(0.9 * self._gap, step if step < LONGEST_STEP else 0.0)
            self._used, self._seen = used, now
        self._looked = now
        self.taken = stats["disk_bytes"] or stats["memory_bytes"]
        self._payload = stats["payload_bytes"]
        # What is kept for reading ahead, or for one kind of samples, may not fill up.
        self._is_full = self._payload >= 0.75 * stats["limit_bytes"]

    def claimant(self, quota: Quota | None, now: float) -> Claimant:
        """Return what it asks for. What borrows asks for more as it fills what it has."""
        borrows = quota is not None and quota.most is not None
        every = (self, *self.above)
        unused = all(are_idle(now - each._seen, each._gap) for each in every)
        is_idle = self.is_alone or (borrows and unused)
        share = 1.0
        if borrows and self.joined.held.capacity_bytes:
            share = self._payload / self.joined.held.capacity_bytes
            share = min(1.0, 2 * share + 0.1 if self._is_full else 1.3 * share + 0.05)
        wants = self.least + share * (self.whole - self.least)
        return Claimant(quota, self.least, self.taken, wants, is_idle)

    def limit(self, size: float) -> None:
        """Let it have so much, of a disk no more than its file system can spare."""
        arena, before = self.joined.held, self.taken
        if not self.path:
            self.taken = arena.limit(self._sizes.payload_in(size))
            return
        if size > before:
            size = before + min(size - before, max(0, spare_bytes(arena.handle.fds[1])))
        if not self.is_near(size):
            self.taken = arena.limit(self._sizes.payload_in(size), patience=_MOVING)
        self._patience.note(self.taken != before)

    def is_near(self, size: float) -> bool:
        """Whether it has about so much, and uses it; or can have no other size for now.

        Memory may be left from before a sample in the way was written, when less fits already.
        """
        arena = self.joined.held
        unused = abs(self._sizes.payload_in(size) - arena.limit_bytes)
        least = _LEAST_CHANGE * self.whole
        is_near = abs(size - self.taken) <= least and unused <= least
        return is_near or self._patience.waits()

    def close(self) -> None:
        """Let go of it, once calls in other threads have ended."""
        self.joined.participant.close()
        self.joined.held.close()


class Left:
    """A disk cache in the directory ``path`` that no job uses, or nothing, where a job just began.

    It keeps what it has, but for what others want that is theirs; one that may borrow lends all of
    it. Raises :class:`~stoker.errors.StokerError` where it cannot be looked at.
    """

    def __init__(self, path: str) -> None:
        self._folder = CacheDir(path)
        meta = self._folder.read()
        self.taken = self._folder.disk_bytes
        if meta is None or not meta.num_ids:  # of another version, in the latter case
            self._sizes = _Sizes(0, lambda _: self.taken)
        else:
            self._sizes = _Sizes(meta.capacity_bytes, partial(file_bytes, meta))
        self.whole, self.least = self._sizes.whole, min(self.taken, self._sizes.least)
        self.why = ""
        self._patience = _Patience()

    def look(self, now: float) -> None:
        """Do nothing: what no job uses stays as it is."""

    def claimant(self, quota: Quota | None, now: float) -> Claimant:
        """Return that it wants what it has, or that it is idle."""
        borrows = quota is not None and quota.most is not None
        return Claimant(quota, self.least, self.taken, self.taken, borrows)

    def limit(self, size: float) -> None:
        """Let it have so much, if that is less."""
        before = self.taken
        try:
            self.taken = shrink_unused(self._folder, self._sizes.payload_in(size))
        finally:
            self._patience.note(self.taken < before)

    def is_near(self, size: float) -> bool:
        """Whether it has no more than about so much; or can have no other size for now."""
        is_near = self.taken - size <= _LEAST_CHANGE * self.whole
        return is_near or self._patience.waits()


def folder_of(arena: Arena) -> str:
    """Return the directory of a disk cache; "" for an arena in memory."""
    fds = arena.handle.fds
    return str(Path(f"/proc/self/fd/{fds[1]}").readlink().parent) if len(fds) > 1 else ""


def is_removed(arena: Arena) -> bool:
    """Whether it is on disk, and its file was removed, though it is used on."""
    fds = arena.handle.fds
    return len(fds) > 1 and os.fstat(fds[1]).st_nlink == 0
