"""The caches that the node's service keeps alive between jobs, and the limits it sets."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import SegmentError, StokerError
from stoker.node.descriptors import Handle
from stoker.node.messages import OtherVersion
from stoker.node.owned import read_file, write_file
from stoker.node.rendezvous import Joined, RendezvousFiles, join
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.store.arena import Arena
from stoker.store.disk import MARKER
from stoker.types import format_bytes

log = logging.getLogger("stoker")

_COMING = 60.0  # seconds that a job has for making the cache it asked for
_SILENT = 5.0  # seconds after which a job that waits, and asks no more, is gone


@dataclass
class _Held:
    joined: Joined[Arena]
    idle_since: float | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no job holds it."""
        return self.joined.participant.is_alone

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.joined.held.overhead_bytes + self.joined.held.capacity_bytes


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
    """A job that did not get the memory that it asked for."""

    asker: Asker
    memory: int
    room: int
    since: float
    asked: float
    """When it did so last."""


class Holding:
    """Holds every cache in memory that it finds of this user, and counts those on disk.

    ``memory`` and ``disk``: maximum bytes of all caches together, None: no limit. ``keep``:
    seconds for which a cache without a job is held, None: until its memory is needed. A cache that
    jobs use is never taken from them, so earlier caches may exceed the limits. Caches on
    disk stay by themselves; those that jobs asked for are remembered in the runtime directory, and
    count until they are removed. Safe in any thread. Raises :class:`OSError` where the runtime
    directory cannot be used.
    """

    def __init__(
        self, memory: int | None = None, disk: int | None = None, keep: float | None = None
    ) -> None:
        self._memory, self._disk, self._keep = memory, disk, keep
        self.memory_aside = 0
        """Bytes of memory that caches take which are not held here, but count."""
        self._held: dict[str, _Held] = {}
        self._others: set[str] = set()  # found of what is no cache in memory
        self._coming: dict[str, tuple[float, int]] = {}  # until when, bytes of memory
        self._turned_down: dict[str, _TurnedDown] = {}  # by the name of the cache
        self._mutex = threading.Lock()
        self._ledger = prepare_runtime_dir() / "service-disks.json"
        self._disks = _read_ledger(self._ledger)

    def look(self) -> None:
        """Hold new caches, and release those that have been idle for too long."""
        found = {files.name: files for files in RendezvousFiles.all(prepare_runtime_dir())}
        with self._mutex:
            self._others &= found.keys()
            for name in found.keys() - self._held.keys() - self._others:
                self._hold(found[name])
            now = time.monotonic()
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
    ) -> int | None:
        """Ask whether a job may make the cache ``name``, unless it is there, of so much memory.

        Returns None if it may, else the bytes that there is room for. Idle caches are released to
        make room, those idle longest first. An idle cache of that name with another payload
        ``capacity`` or other ``regions`` is released too. Of jobs that wait the one that asked
        first is admitted first; one that does not wait takes what room there is.
        """
        asker = asker or Asker()
        if not self.could_ever(memory):
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
            if asker.waits and self._is_behind(name):
                return self._turn_down(name, memory, asker)
            while self._memory is not None and self._used() + memory > self._memory:
                idle = [other for other, each in self._held.items() if each.is_alone]
                if not idle:
                    return self._turn_down(name, memory, asker)
                now = time.monotonic()
                self._drop(min(idle, key=lambda other: self._held[other].idle_since or now))
            self._turned_down.pop(name, None)
            self._coming[name] = time.monotonic() + _COMING, memory
            return None

    def has_room(self, memory: int) -> bool:
        """Whether there is room for so much more memory now."""
        with self._mutex:
            return self._memory is None or self._used() + memory <= self._memory

    def could_ever(self, memory: int) -> bool:
        """Whether there is room for so much memory if there are no other caches."""
        return self._memory is None or memory + self.memory_aside <= self._memory

    def turned_down(self) -> list[dict[str, Any]]:
        """Return the jobs that wait for memory or got less than they asked for, and why."""
        now = time.monotonic()
        with self._mutex:
            self._forget_gone(now)
            return [
                {
                    "job": each.asker.job,
                    "data": each.asker.data,
                    "waits": each.asker.waits,
                    "seconds": now - each.since,
                    "wanted_bytes": each.memory,
                    "room_bytes": each.room,
                    "why": self._why(name),
                }
                for name, each in self._turned_down.items()
            ]

    def admit_disk(self, path: str, size: int) -> int | None:
        """Ask whether a job may have a disk cache of ``size`` bytes in the directory ``path``.

        Returns None if it may, or has it, else the bytes that there is room for.
        """
        with self._mutex:
            self._disks = {at: n for at, n in self._disks.items() if _is_cache(at)}
            others = sum(n for at, n in self._disks.items() if at != path)
            if self._disk is not None and others + size > self._disk:
                return max(0, self._disk - others)
            self._disks[path] = size
            write_file(self._ledger, json.dumps(self._disks).encode())
            return None

    def limits(self) -> dict[str, int | None]:
        """Return usage and limits, in bytes."""
        with self._mutex:
            memory = self._used()
        return {
            "memory_bytes": memory,
            "memory_limit_bytes": self._memory,
            "disk_bytes": sum(self._disks.values()),
            "disk_limit_bytes": self._disk,
        }

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

    def _turn_down(self, name: str, memory: int, asker: Asker) -> int:
        """Note that a job does not get so much memory now; return what there is room for."""
        now, before = time.monotonic(), self._turned_down.get(name)
        room = max(0, (self._memory or 0) - self._used())
        since = now if before is None else before.since
        self._turned_down[name] = _TurnedDown(asker, memory, room, since, now)
        return room

    def _is_behind(self, name: str) -> bool:
        """Whether another job has waited for longer than that which asks for ``name``."""
        now, own = time.monotonic(), self._turned_down.get(name)
        self._forget_gone(now)
        return any(
            each.asker.waits and (own is None or each.since < own.since)
            for other, each in self._turned_down.items()
            if other != name
        )

    def _why(self, name: str) -> str:
        others = [held for other, held in self._held.items() if other != name and not held.is_alone]
        taken = format_bytes(sum(held.memory for held in others))
        behind = "another job has waited longer; " if self._is_behind(name) else ""
        count = f"{len(others)} cache{'' if len(others) == 1 else 's'} in use"
        return f"{behind}{count} took {taken} of {format_bytes(self._memory or 0)}"

    def _forget_gone(self, now: float) -> None:
        """Forget jobs that wait no more, and those whose smaller cache is gone."""
        for name, each in list(self._turned_down.items()):
            is_there = name in self._held or now - each.asked < _COMING
            if now - each.asked > _SILENT if each.asker.waits else not is_there:
                del self._turned_down[name]

    def _hold(self, files: RendezvousFiles) -> None:
        try:
            self._held[files.name] = _Held(join(files, _attach_in_memory))
            self._coming.pop(files.name, None)
        except StokerError:
            self._others.add(files.name)
        except OtherVersion as error:
            self._others.add(files.name)
            log.warning("a cache is not held when its jobs end: %s", error)
        except OSError:
            pass  # it is just going away, or not there yet

    def _drop(self, name: str) -> None:
        held = self._held.pop(name)
        held.joined.participant.close()
        held.joined.held.close()

    def _used(self) -> int:
        now = time.monotonic()
        coming = sum(memory for until, memory in self._coming.values() if until > now)
        return self.memory_aside + coming + sum(held.memory for held in self._held.values())


def _keys(held: Iterable[_Held]) -> list[str]:
    return sorted(each.joined.said.key for each in held if each.joined.said is not None)


def _attach_in_memory(handle: Handle) -> Arena:
    if len(handle.fds) != 1:
        raise SegmentError("this lies on disk, or is no cache")
    return Arena.attach(handle)


def _is_cache(path: str) -> bool:
    """Whether ``path``, which a job named, is a disk cache."""
    try:
        return (Path(path) / MARKER).exists()
    except (OSError, ValueError):
        return False


def _read_ledger(path: Path) -> dict[str, int]:
    """Return the disk caches that are known from before; none if that cannot be read."""
    try:
        found = json.loads(read_file(path))
        return {str(at): int(size) for at, size in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
