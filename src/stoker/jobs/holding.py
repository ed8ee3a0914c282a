"""The caches that the node's service keeps alive between jobs, and the limits it sets."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.jobs.held import Cache, Held, Left, folder_of, is_removed
from stoker.jobs.quotas import Claimant, Quota, divide, quota_for, quota_of_user
from stoker.node.messages import OtherVersion
from stoker.node.owned import read_file, write_file
from stoker.node.rendezvous import RendezvousFiles, join
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.store.arena import Arena
from stoker.store.disk import MARKER
from stoker.types import format_bytes

log = logging.getLogger("stoker")

_COMING = 60.0  # seconds that a job has for making the cache it asked for
_OPENS = 10.0  # seconds that it has for opening one on disk, before others may have its disk
_ANSWERS = 1.0  # seconds that who has a cache may take to hand it on, before others are asked
_SHOWN = 600.0  # seconds for which it is told that a job got no disk cache
_SILENT = 5.0  # seconds after which a job that waits, and asks no more, is gone
_LEAST_NOTED = 0.02  # of a disk cache; a smaller change is not noted for a later service


@dataclass(frozen=True)
class Asker:
    """Who asks for a cache."""

    job: str = ""
    """What the job calls itself."""
    data: str = ""
    """What it is a cache of."""
    waits: bool = False
    """Whether the job asks again if there is no room now."""


@dataclass
class _TurnedDown:
    """A job that did not get the memory or disk that it asked for."""

    asker: Asker
    size: int
    room: int
    since: float
    asked: float
    """When it did so last."""
    why: str = ""
    """Where it asked for disk."""


class Holding:
    """Holds every cache in memory that it finds of this user, and those on disk while jobs do.

    ``memory`` and ``disk``: maximum bytes of all caches together, None: no limit. ``keep``:
    seconds for which a cache without a job is held, None: until its memory is needed. ``quotas``
    are for the caches that jobs of some names made; the first that matches counts. A cache that
    jobs use shrinks only where others have a right to the memory or disk, or it is borrowed (see
    :func:`~stoker.jobs.quotas.divide`), so earlier caches may exceed the limits. Caches on
    disk stay by themselves; they are remembered in the runtime directory, and count until they
    are removed. Safe in any thread. Raises :class:`OSError` where the runtime
    directory cannot be used.
    """

    def __init__(
        self,
        memory: int | None = None,
        disk: int | None = None,
        keep: float | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        self._memory, self._disk, self._keep, self._quotas = memory, disk, keep, tuple(quotas)
        self.memory_aside = 0
        """Bytes of memory that caches take which are not held here, but count."""
        self.read_for: Mapping[int, int] = {}
        """Of these, what was read for each user."""
        self._user = os.geteuid()
        self._held: dict[str, Held] = {}
        self._on_disk: dict[str, Held] = {}  # by the folder
        self._left: dict[str, Left] = {}  # likewise, which no job uses
        self._unreadable: set[str] = set()  # likewise, what they hold cannot be told
        self._others: set[str] = set()  # found of what is no cache
        self._coming: dict[str, tuple[float, int]] = {}  # until when, bytes of memory
        self._opening: dict[str, float] = {}  # disk caches that jobs open, until when
        self._busy: set[Held] = set()  # whose disk is being given back or taken
        self._let_go_of: set[Held] = set()  # of these, who are to be closed then
        self._turned_down: dict[str, _TurnedDown] = {}  # by the name of the cache
        self._mutex = threading.Lock()  # for moments: no file system of a user's is asked in it
        self._looking = threading.Lock()
        folder = prepare_runtime_dir()
        self._ledger = folder / "service-disks.json"
        self._makers_file = folder / "service-jobs.json"
        self._disks = {path: int(size) for path, size in _read(self._ledger, int).items()}
        self._makers: dict[str, str] = _read(self._makers_file, str)
        """The jobs for which caches were made, by the name in memory or the folder on disk."""
        self._names: dict[str, str] = {}  # of held ones on disk, by the folder

    def look(self) -> None:
        """Hold new caches, and release those that have been idle for too long."""
        with self._looking:
            found = {files.name: files for files in RendezvousFiles.all(prepare_runtime_dir())}
            with self._mutex:
                self._others &= found.keys()
                known = found.keys() | self._coming.keys() | self._disks.keys()
                if gone := self._makers.keys() - known:
                    self._note_makers(dict.fromkeys(gone))
                known = self._held.keys() | self._others | set(self._names.values())
            for name in found.keys() - known:
                if (held := self._join(found[name])) is not None:
                    with self._mutex:
                        self._hold(name, held)
            self._release_idle()

    def _release_idle(self) -> None:
        with self._mutex:
            now = time.monotonic()
            for path, held in list(self._on_disk.items()):
                if held.is_alone:
                    self._let_go(path)
                elif abs(self._disks.get(path, 0) - held.taken) > _LEAST_NOTED * held.whole:
                    self._note_disk(path, held.taken)
            for name, held in list(self._held.items()):
                alone = held.is_alone
                held.idle_since = (held.idle_since or now) if alone else None
                if self._keep is not None and alone and now - (held.idle_since or now) > self._keep:
                    self._drop(name)
            self._forget_gone(now)

    def admit(
        self,
        name: str,
        memory: int,
        capacity: int,
        regions: Sequence[dict[str, Any]],
        asker: Asker | None = None,
        least: int | None = None,
    ) -> int | None:
        """Ask whether a job may make the cache ``name``, unless it is there, of so much memory.

        Returns None if it may, else the bytes that there is room for. Idle caches are released to
        make room, those idle longest first. An idle cache of that name with another payload
        ``capacity`` or other ``regions`` is released too. Of jobs that wait the one that asked
        first is admitted first, those of a higher priority before; one that does not wait takes
        what room there is. ``least``: bytes that it takes at first, if it can grow later; then
        it may have what others are about to give back, and :meth:`granted` is what it takes until
        then. One that borrows never waits.
        """
        asker = asker or Asker()
        if not self.could_ever(memory, asker.job):
            asker = replace(asker, waits=False)
        with self._mutex:
            held = self._held.get(name)
            if held is not None:
                said = held.joined.said
                if said is None or (said.capacity_bytes, said.regions) == (capacity, regions):
                    return None
                if not held.is_alone:
                    return None
                self._drop(name)
            self._coming.pop(name, None)
            if asker.waits and self._is_behind(name, asker.job, memory):
                return self._turn_down(name, memory, asker)
            quota = self._quota(asker.job)
            if least is not None and quota is not None and quota.most is not None:
                asker = replace(asker, waits=False)
                if memory > min(quota.bound, self._of_all()):
                    return self._turn_down(name, memory, asker, least)
            else:
                while self._room(asker.job) < memory:
                    idle = self._idle_in_the_way(asker.job, memory)
                    if idle:
                        self._drop(idle[0])
                    elif self._share(asker.job, memory, least) < memory:
                        return self._turn_down(name, memory, asker, least)
                    else:
                        break
            self._turned_down.pop(name, None)
            self._expect(name, memory, asker.job, least)
            return None

    def granted(self, name: str) -> int | None:
        """Return the bytes that a cache which is about to be made may take at first."""
        with self._mutex:
            return self._coming[name][1] if name in self._coming else None

    def balance(self) -> None:
        """Have caches give back memory that others have a right to, and use what others leave."""
        with self._mutex:
            held = dict(self._held)
            if not self._lends and not any(each.is_limited for each in held.values()):
                return
            memory = self._of_all() - self._about_to_come()
            changes = self._changes(held, {name: self._quota_of(name) for name in held}, memory)
        self._change(changes)

    def balance_disk(self) -> None:
        """Do the same with disk. What a job left takes no more, but gives back likewise."""
        self._forget_disks()
        left = self._find_left()
        with self._mutex:
            on_disk = list(self._on_disk.values())
            if not self._lends_disk and not any(each.is_limited for each in on_disk):
                return
            held: dict[str, Cache] = {**self._on_disk, **self._still_left(left)}
            for each in on_disk:
                each.above = [other for other in self._held.values() if other.is_above(each)]
            quotas = {path: self._disk_quota_of(path) for path in held}
            disk = math.inf if self._disk is None else self._disk
            changes = self._changes(held, quotas, disk - self._disk_apart(held))
            self._busy = set(on_disk)
        try:
            self._change(changes)
        finally:
            with self._mutex:
                self._busy.clear()
                for each in self._let_go_of:
                    each.close()
                self._let_go_of.clear()
                for path, unused in self._left.items():
                    if unused.taken != self._disks.get(path, unused.taken):
                        self._note_disk(path, unused.taken)

    def _changes(
        self, held: Mapping[str, Cache], quotas: Mapping[str, Quota | None], whole: float
    ) -> tuple[list[tuple[float, Cache]], float]:
        """Return by how much which caches are to change, those that shrink first, and the rest."""
        now = time.monotonic()
        for each in held.values():
            each.look(now)
        claimants = [each.claimant(quotas[name], now) for name, each in held.items()]
        goals = divide(whole, claimants).tolist()
        changes = []
        for each, claimant, goal in zip(held.values(), claimants, goals, strict=True):
            each.why = _why_limited(claimant) if goal < each.whole else ""
            if not each.is_near(goal):
                changes.append((goal - each.taken, each))
        changes.sort(key=lambda change: change[0])
        return changes, whole - sum(each.taken for each in held.values())

    def _change(self, changes: tuple[list[tuple[float, Cache]], float]) -> None:
        todo, room = changes
        for change, each in todo:  # first those that give back, which may take a while
            before = each.taken
            try:
                if change <= 0 or room > 0:
                    each.limit(before + min(change, room if change > 0 else 0.0))
            except (StokerError, OSError) as error:  # dropped meanwhile, or a process is stopped
                log.info("a cache stays as large as it is for now: %s", error)
            room -= each.taken - before

    def limited(self) -> list[dict[str, Any]]:
        """Return the caches that have less memory or disk than they could, and why."""
        with self._mutex:
            every = [*self._held.values(), *self._on_disk.values()]
            held = [h for h in every if h.joined.said is not None and h.is_limited]
            return [
                {
                    "key": each.joined.said.key,
                    "data": each.joined.said.description,
                    "limit_bytes": each.joined.held.limit_bytes,
                    "capacity_bytes": each.joined.held.capacity_bytes,
                    "why": each.why,
                }
                for each in held
                if each.joined.said is not None
            ]

    def room_of(self, user: int) -> float:
        """Return the bytes that may yet be read for a user into what a group shares."""
        quota = quota_of_user(user, self._quotas)
        with self._mutex:
            return math.inf if quota is None else quota.bound - self._used(quota)

    def has_room(self, memory: int) -> bool:
        """Whether there is room for so much more memory now."""
        with self._mutex:
            return self._memory is None or self._used() + memory <= self._memory

    def could_ever(self, memory: int, job: str = "") -> bool:
        """Whether there is room for so much memory if there are no other caches."""
        quota = self._quota(job)
        return memory <= min(self._of_all(), math.inf if quota is None else quota.bound)

    def turned_down(self) -> list[dict[str, Any]]:
        """Return the jobs that wait for memory, or got less of it or of disk, and why."""
        now = time.monotonic()
        with self._mutex:
            self._forget_gone(now)
            return [
                {
                    "job": each.asker.job,
                    "data": each.asker.data,
                    "waits": each.asker.waits,
                    "seconds": now - each.since,
                    "wanted_bytes": each.size,
                    "room_bytes": each.room,
                    "is_of_disk": bool(each.why),
                    "why": each.why or self._why(name, each),
                }
                for name, each in list(self._turned_down.items())  # why forgets who is gone
            ]

    def admit_disk(
        self, path: str, size: int, asker: Asker | None = None, least: int | None = None
    ) -> int | None:
        """Ask whether a job may have a disk cache of ``size`` bytes in the directory ``path``.

        Returns None if it may, or has it, else the bytes that there is room for. ``least``: bytes
        that it takes at first, if it can grow later; then it may have what others are about to
        give back, or borrow, and :meth:`granted_on_disk` is what it takes until then.
        """
        asker, name = asker or Asker(), f"disk {path}"
        self._forget_disks()
        left = {} if least is None else self._find_left()
        with self._mutex:
            self._left.pop(path, None)
            self._unreadable.discard(path)
            held = self._on_disk.get(path)
            if held is not None and held.is_alone:
                self._let_go(path)  # it is opened again, by this job's rules
            elif held is not None:
                self._turned_down.pop(name, None)
                return None
            quota = self._quota(asker.job)
            room, why = self._room_on_disk(path, quota)
            if size > max(room, self._share_of_disk(path, quota, size, least, left)):
                now, there_is = time.monotonic(), max(0, int(room))
                asker = replace(asker, waits=False)
                self._turned_down[name] = _TurnedDown(asker, size, there_is, now, now, why)
                return there_is
            self._turned_down.pop(name, None)
            self._opening[path] = time.monotonic() + _OPENS
            self._note_disk(path, size if size <= room else int(max(least or 0, room)))
            self._note_makers({path: asker.job})
            return None

    def granted_on_disk(self, path: str) -> int | None:
        """Return the bytes that a disk cache which is about to be opened may take at first."""
        with self._mutex:
            return self._disks.get(path)

    def limits(self) -> dict[str, int | None]:
        """Return usage and limits, in bytes."""
        with self._mutex:
            memory, disk = self._used(), sum(self._sizes_on_disk().values())
        return {
            "memory_bytes": memory,
            "memory_limit_bytes": self._memory,
            "disk_bytes": disk,
            "disk_limit_bytes": self._disk,
        }

    def quotas(self) -> list[dict[str, Any]]:
        """Return the quotas, and what is taken of each, in bytes."""
        with self._mutex:
            return [
                {
                    "jobs": quota.jobs,
                    "whose": quota.whose,
                    "priority": quota.priority,
                    "weight": quota.weight,
                    "memory_bytes": (used := self._used(quota)),
                    "memory_limit_bytes": None if quota.bound == math.inf else int(quota.bound),
                    "borrowed_bytes": (
                        None if quota.most is None else max(0, used - (quota.memory or 0))
                    ),
                    "disk_bytes": (on_disk := self._used_of_disk(quota)),
                    "disk_limit_bytes": (
                        None if quota.on_disk.bound == math.inf else int(quota.on_disk.bound)
                    ),
                    "disk_borrowed_bytes": (
                        None if quota.disk_most is None else max(0, on_disk - (quota.disk or 0))
                    ),
                }
                for quota in self._quotas
            ]

    def keys(self) -> list[str]:
        """Return the keys of all caches that are held."""
        with self._mutex:
            return sorted(
                h.joined.said.key for h in self._held.values() if h.joined.said is not None
            )

    def idle(self) -> list[str]:
        """Return the keys of caches that no job holds."""
        with self._mutex:
            held = [h for h in self._held.values() if h.idle_since is not None]
        return _keys(held)

    def close(self) -> None:
        """Release all of them; jobs that use them continue."""
        with self._mutex:
            for name in list(self._held):
                self._drop(name)
            for path in list(self._on_disk):
                self._let_go(path)

    def _turn_down(self, name: str, memory: int, asker: Asker, least: int | None = None) -> int:
        """Note that a job does not get so much memory now; return what there is room for."""
        now, before = time.monotonic(), self._turned_down.get(name)
        room = max(0, int(self._share(asker.job, memory, least)))
        since = now if before is None else before.since
        self._turned_down[name] = _TurnedDown(asker, memory, room, since, now)
        if not asker.waits:  # it makes what there is room for
            self._expect(name, room, asker.job, least)
        return room

    def _expect(self, name: str, memory: int, job: str, least: int | None = None) -> None:
        """Count a cache from now on that is about to be made, as far as there is room now."""
        if least is not None:
            memory = int(min(memory, max(least, self._room(job))))
        self._coming[name] = time.monotonic() + _COMING, memory
        self._note_makers({name: job})

    @property
    def _lends(self) -> bool:
        """Whether anyone has a right to memory that others may have."""
        is_claimed = any(q.memory is not None or q.most is not None for q in self._quotas)
        return self._memory is not None and is_claimed

    @property
    def _lends_disk(self) -> bool:
        """Whether anyone has a right to disk that others may have."""
        is_claimed = any(q.disk is not None or q.disk_most is not None for q in self._quotas)
        return self._disk is not None and is_claimed

    def _share(self, job: str, memory: int, least: int | None) -> float:
        """Return the bytes that a job's cache may have, with what others then give back."""
        room, quota = self._room(job), self._quota(job)
        if least is None or not self._lends:
            return room
        if quota is not None and quota.most is not None:  # in time
            return min(memory, quota.bound, self._of_all())
        now = time.monotonic()
        others = [held.claimant(self._quota_of(name), now) for name, held in self._held.items()]
        newcomer = Claimant(quota, least, 0.0, memory)
        whole = self._of_all() - self._about_to_come()
        return max(room, float(divide(whole, [*others, newcomer])[-1]))

    def _of_all(self) -> float:
        """Return the bytes that caches which are held here may have together."""
        return math.inf if self._memory is None else self._memory - self.memory_aside

    def _about_to_come(self) -> int:
        now = time.monotonic()
        return sum(size for until, size in self._coming.values() if until > now)

    def _room(self, job: str) -> float:
        """Return the bytes of memory that there are for a job's cache."""
        quota = self._quota(job)
        room = math.inf if self._memory is None else self._memory - self._used()
        if quota is not None and quota.bound < math.inf:
            room = min(room, quota.bound - self._used(quota))
        return room

    def _room_on_disk(self, path: str, quota: Quota | None) -> tuple[float, str]:
        """Return the bytes that there are for a cache in ``path``, and what bounds them."""
        others = {at: n for at, n in self._sizes_on_disk().items() if at != path}
        room, why = math.inf, ""
        if self._disk is not None:
            room = self._disk - sum(others.values())
            why = f"disk caches have {format_bytes(self._disk)} together"
        if quota is not None and (bound := quota.on_disk.bound) < math.inf:
            left = bound - sum(n for at, n in others.items() if self._is_of(quota, at))
            if left < room:
                size = format_bytes(int(bound))
                room, why = left, f"the quota of {quota.whose} is {size} of disk"
        return room, why

    def _share_of_disk(
        self,
        path: str,
        quota: Quota | None,
        size: int,
        least: int | None,
        left: Mapping[str, Left],
    ) -> float:
        """Return the bytes that a cache in ``path`` may have, with what others then give back."""
        if least is None or not self._lends_disk or self._disk is None:
            return 0.0
        own = None if quota is None else quota.on_disk
        if own is not None and own.most is not None:  # in time
            return size if least <= min(own.bound, self._disk) else 0.0
        held: dict[str, Cache] = {**self._on_disk, **self._still_left(left)}
        held.pop(path, None)
        now = time.monotonic()
        others = [each.claimant(self._disk_quota_of(at), now) for at, each in held.items()]
        newcomer = Claimant(own, least, 0.0, size)
        whole = self._disk - self._disk_apart({**held, path: None})
        return float(divide(whole, [*others, newcomer])[-1])

    def _unused(self) -> set[str]:
        """Return the folders of the disk caches that no job uses or opens."""
        now = time.monotonic()
        self._opening = {path: until for path, until in self._opening.items() if until > now}
        return self._disks.keys() - self._on_disk.keys() - self._opening.keys()

    def _forget_disks(self) -> None:
        """Forget disk caches that were removed, and those that were granted and never made."""
        with self._mutex:
            unused = self._unused()
        gone = {path for path in unused if not _is_cache(path)}
        with self._mutex:
            for path in gone & self._unused():
                del self._disks[path]
                self._left.pop(path, None)
                self._unreadable.discard(path)

    def _find_left(self) -> dict[str, Left]:
        """Return the disk caches that no job uses or opens, by their folders, if disk is lent."""
        if not self._lends_disk:
            return {}
        with self._mutex:
            found = dict(self._left)
            new = self._unused() - found.keys() - self._unreadable
        unreadable = set()
        for path in new:
            try:
                found[path] = Left(path)
            except StokerError as error:
                unreadable.add(path)
                log.info("%s counts, and stays as it is: %s", path, error)
        with self._mutex:
            self._unreadable |= unreadable & self._unused()
        return found

    def _still_left(self, found: Mapping[str, Left]) -> dict[str, Left]:
        """Note what is still left of what was found so before."""
        unused = self._unused()
        for path, left in found.items():
            self._left.setdefault(path, left)
        self._left = {path: left for path, left in self._left.items() if path in unused}
        return dict(self._left)

    def _sizes_on_disk(self) -> dict[str, int]:
        return self._disks | {path: held.taken for path, held in self._on_disk.items()}

    def _disk_apart(self, held: Container[str]) -> int:
        """Return the bytes of disk that others have."""
        return sum(n for path, n in self._sizes_on_disk().items() if path not in held)

    def _used_of_disk(self, quota: Quota) -> int:
        return sum(n for at, n in self._sizes_on_disk().items() if self._is_of(quota, at))

    def _disk_quota_of(self, path: str) -> Quota | None:
        quota = self._quota_of(path)
        return None if quota is None else quota.on_disk

    def _note_disk(self, path: str, size: int) -> None:
        """Note what a disk cache takes. A later service reads it."""
        self._disks[path] = size
        write_file(self._ledger, json.dumps(self._disks).encode())

    def _lacks_quota(self, job: str, memory: int) -> bool:
        """Whether so much memory is more than what is left of the job's quota."""
        quota = self._quota(job)
        return quota is not None and self._used(quota) + memory > quota.bound

    def _idle_in_the_way(self, job: str, memory: int) -> list[str]:
        """Return idle caches that take the room for a job's; the first is missed least."""
        quota = self._quota(job) if self._lacks_quota(job, memory) else None
        now = time.monotonic()
        idle = [
            name
            for name, held in self._held.items()
            if held.is_alone and (quota is None or self._is_of(quota, name))
        ]
        return sorted(
            idle,
            key=lambda name: (self._priority(name), self._held[name].idle_since or now),
        )

    def _is_behind(self, name: str, job: str, memory: int) -> bool:
        """Whether another job that waits for the same is before that which asks for ``name``."""
        own = self._turned_down.get(name)
        self._forget_gone(time.monotonic())
        quota = self._quota(job)
        place = (-(quota.priority if quota else 0), math.inf if own is None else own.since)
        for other, each in self._turned_down.items():
            theirs = self._quota(each.asker.job)
            is_before = (-(theirs.priority if theirs else 0), each.since) < place
            is_apart = self._lacks_quota(each.asker.job, each.size) and theirs is not quota
            if other != name and each.asker.waits and is_before and not is_apart:
                return True
        return False

    def _why(self, name: str, each: _TurnedDown) -> str:
        job, quota = each.asker.job, self._quota(each.asker.job)
        is_behind = self._is_behind(name, job, each.size)
        behind = "another job has waited longer or is first; " if is_behind else ""
        others = [
            other for other, held in self._held.items() if other != name and not held.is_alone
        ]
        limit, whose = self._memory, ""
        if quota is not None and self._lacks_quota(job, each.size):
            others = [other for other in others if self._is_of(quota, other)]
            limit, whose = int(quota.bound), f"the quota of {quota.whose}, "
        taken = format_bytes(sum(self._held[other].taken for other in others))
        count = f"{len(others)} cache{'' if len(others) == 1 else 's'} in use"
        return f"{behind}{count} took {taken} of {whose}{format_bytes(limit or 0)}"

    def _quota(self, job: str) -> Quota | None:
        return quota_for(job, self._user, self._quotas)

    def _quota_of(self, cache: str) -> Quota | None:
        return self._quota(self._makers.get(cache, ""))

    def _is_of(self, quota: Quota, cache: str) -> bool:
        """Whether a cache in memory or on disk counts for that quota."""
        return self._quota_of(cache) is quota

    def _priority(self, cache: str) -> int:
        quota = self._quota_of(cache)
        return 0 if quota is None else quota.priority

    def _note_makers(self, changed: Mapping[str, str | None]) -> None:
        """Note for which jobs caches were made; None: they are gone. A later service reads it."""
        makers = {**self._makers, **changed}
        self._makers = {name: job for name, job in makers.items() if job is not None}
        write_file(self._makers_file, json.dumps(self._makers).encode())

    def _forget_gone(self, now: float) -> None:
        """Forget jobs that wait no more, and those whose smaller cache is gone."""
        for name, each in list(self._turned_down.items()):
            is_there = name in self._held or now - each.asked < (_SHOWN if each.why else _COMING)
            if now - each.asked > _SILENT if each.asker.waits else not is_there:
                del self._turned_down[name]

    def _join(self, files: RendezvousFiles) -> Held | None:
        """Return what is found there; None if it is no cache, or just going away."""
        try:
            joined = join(files, Arena.attach, _ANSWERS)
            try:
                folder = folder_of(joined.held)
                path = self._known_as(folder) if folder else ""
                return Held(joined, _aside(path, files.name) if is_removed(joined.held) else path)
            except BaseException:
                joined.participant.close()
                joined.held.close()
                raise
        except OtherVersion as error:
            log.warning("a cache is not held when its jobs end: %s", error)
        except StokerError:
            pass
        except OSError:
            return None  # or is not there yet
        with self._mutex:
            self._others.add(files.name)
        return None

    def _hold(self, name: str, held: Held) -> None:
        path = held.path
        if not path:
            self._held[name] = held
            self._coming.pop(name, None)
            return
        if path in self._on_disk:
            self._set_aside(path)
        self._on_disk[path], self._names[path] = held, name
        self._opening.pop(path, None)
        self._left.pop(path, None)

    def _set_aside(self, path: str) -> None:
        """Note by another name a disk cache that jobs use on, though another took its place."""
        name, held = self._names.pop(path), self._on_disk.pop(path)
        aside = _aside(path, name)
        self._on_disk[aside], self._names[aside] = held, name
        self._note_disk(aside, held.taken)
        self._note_makers({aside: self._makers.get(path)})

    def _drop(self, name: str) -> None:
        self._held.pop(name).close()

    def _let_go(self, path: str) -> None:
        """Hold a disk cache no longer: it stays by itself, and the next job opens it."""
        held = self._on_disk.pop(path)
        del self._names[path]
        if held in self._busy:  # to close it now would wait for the disk
            held.joined.participant.close()
            self._let_go_of.add(held)
        else:
            held.close()
        self._note_disk(path, held.taken)

    def _known_as(self, folder: str) -> str:
        """Return by which path a job named the folder of its disk cache."""
        with self._mutex:
            known = list(self._disks)
        for path in known:
            with contextlib.suppress(OSError):
                if Path(path).samefile(folder):
                    return path
        return folder

    def _used(self, quota: Quota | None = None) -> int:
        """Return the bytes of memory of all caches, or of those that count for ``quota``."""
        now = time.monotonic()
        sizes = {name: size for name, (until, size) in self._coming.items() if until > now}
        sizes |= {name: held.taken for name, held in self._held.items()}
        if quota is None:
            return self.memory_aside + sum(sizes.values())
        shared = 0 if quota.user is None else self.read_for.get(quota.user, 0)
        return shared + sum(size for name, size in sizes.items() if self._is_of(quota, name))


def _why_limited(claimant: Claimant) -> str:
    if claimant.is_idle:
        return "it is idle, and lent to others"
    if claimant.quota is None:
        return "others have a right to the rest"
    by_right = format_bytes(claimant.quota.memory or 0)
    return f"{claimant.quota.whose} have {by_right} by right, and others use or want the rest"


def _keys(held: Iterable[Held]) -> list[str]:
    return sorted(each.joined.said.key for each in held if each.joined.said is not None)


def _aside(path: str, name: str) -> str:
    """Return what a disk cache is called whose file was removed from there while it is used."""
    return f"{path} (removed, {name})"


def _is_cache(path: str) -> bool:
    """Whether ``path``, which a job named, is a disk cache."""
    try:
        return (Path(path) / MARKER).exists()
    except (OSError, ValueError):
        return False


def _read(path: Path, kind: type) -> dict[str, Any]:
    """Return what an earlier service noted; nothing if that cannot be read."""
    try:
        found = json.loads(read_file(path))
        return {str(name): value for name, value in found.items() if type(value) is kind}
    except (OSError, ValueError, AttributeError):
        return {}
