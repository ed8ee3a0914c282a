"""What jobs of several users at one cache will need, as they tell it, and what to keep for that.

Each process of a job tells the accesses that it knows are coming, and how many of them it has had.
The next use of a sample by any of them, in seconds, is that of :func:`~stoker.jobs.merged.soonest`,
as for the jobs of one user. Paces are measured here. Nothing that is told is believed more than
that: a wrong plan costs hits, and the memory of plans is bounded, for each user too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.jobs.merged import soonest
from stoker.store.arena import Arena
from stoker.store.tier import Ids

Job = tuple[int, int]
"""A process that tells a plan: its user, as the kernel knows it, and the number it gives itself."""

MOST_PLANS = 128
"""Plans at one cache."""
_OF_ONE = 0.25  # of these, and of their memory, that one user may have
_LEAST_BYTES = 64 << 20  # that plans may take, however small the cache
_SHARE = 1 / 16  # of the cache that they may take if it is larger
_NEVER = 1 << 53  # the access by which what is not needed again is used
_MEASURED = 0.25  # seconds over which a pace is measured
_NEW = 0.5  # weight of the latest measurement
_IDLE = 30.0  # seconds without an access after which a job counts as slower
_VICTIMS = 4096  # samples that are known to be used last
_GLANCE = 0.02  # seconds between two looks at which those are
SELDOM = 20.0
"""What a look at all samples takes is a part so small of the time between two."""


class Coming:
    """The coming accesses of one process: ``ids`` ``u32[A]``, each below ``num_samples``.

    ``length`` of them are of the epoch in progress; what comes after those that are known is
    expected half an epoch later, and with ``is_last`` never. Not thread-safe.
    """

    def __init__(self, ids: Ids, length: int, is_last: bool, num_samples: int) -> None:
        self.position = 0
        """Accesses that are over."""
        self.rate = 0.0
        """Accesses per second; 0: not measured yet."""
        self.period = float(max(1, length))
        """Accesses in an epoch."""
        self.noted = self._since = time.monotonic()
        self._start = 0  # the position then
        self._ids = ids
        later = np.empty(len(ids), np.int64)
        if len(ids):
            core.next_use(ids, ids[:0], later)
        self._after = later.astype(np.uint32)
        self._next = np.full(num_samples, len(ids), np.uint32)
        self._next[ids[::-1]] = np.arange(len(ids), dtype=np.uint32)[::-1]
        self._unknown = _NEVER if is_last else len(ids) + length // 2

    @staticmethod
    def bytes(accesses: int, num_samples: int) -> int:
        """Return the bytes of memory that it takes."""
        return 8 * accesses + 4 * num_samples

    def uses(self, ids: Ids) -> NDArray[np.int64]:
        """Return i64[n], the access by which each of ``ids`` u32[n] is used next."""
        return self._known(self._next[ids])

    def uses_after(self, ids: Ids) -> NDArray[np.int64]:
        """Return i64[n], the access by which each is used next but one."""
        return self._known(self._following(self._next[ids]))

    def take(self, ids: Ids) -> None:
        """Note that the process has taken samples ``ids`` u32[n] for their next access each."""
        self._next[ids] = self._following(self._next[ids])

    def pass_by(self, position: int, now: float) -> Ids:
        """Note that all accesses before ``position`` are over at ``now``; return their samples."""
        begin, self.position = self.position, max(self.position, min(position, len(self._ids)))
        passed = self._ids[begin : self.position]
        if not len(passed):
            return passed
        # In their order: of a sample that comes again the last one counts. What was taken for a
        # later access meanwhile stays so.
        latest = self._next[passed]
        self._next[passed] = self._after[begin : self.position]
        self._next[passed] = np.maximum(self._next[passed], latest)
        self.noted = now
        if now - self._since >= _MEASURED or not self.rate:
            self._measure(now)
        return passed

    def goes_on(self, earlier: Coming) -> None:
        """Take over the pace of the plan that this one replaces."""
        self.rate = earlier.rate

    def pace(self, now: float) -> float:
        """Return accesses per second; less where the latest was long ago."""
        return self.rate * _IDLE / max(_IDLE, now - self.noted)

    def _measure(self, now: float) -> None:
        seconds = now - self._since
        if seconds <= 0:
            return
        rate = (self.position - self._start) / seconds
        self.rate = rate if not self.rate else self.rate + _NEW * (rate - self.rate)
        if seconds >= _MEASURED:
            self._since, self._start = now, self.position

    def _following(self, positions: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return u32[n], the next accesses to the samples at ``positions``."""
        after = positions.copy()
        known = positions < len(self._ids)
        after[known] = self._after[positions[known]]
        return after

    def _known(self, positions: NDArray[np.uint32]) -> NDArray[np.int64]:
        found = positions.astype(np.int64)
        found[positions >= len(self._ids)] = self._unknown
        return found


class Plans:
    """The plans of all jobs at a cache of ``num_samples`` samples and ``capacity`` bytes.

    ``admit`` is asked for bytes of memory before a plan takes them, and returns whether it may.
    Safe in any thread.
    """

    def __init__(
        self, num_samples: int, capacity: int, admit: Callable[[int], bool] = lambda _: True
    ) -> None:
        self._num_samples = num_samples
        self._most_bytes = max(_LEAST_BYTES, int(_SHARE * capacity))
        self._admit = admit
        self._mutex = threading.Lock()
        self._building = threading.Lock()  # one at a time, as that takes memory of its own
        self._jobs: dict[Job, Coming] = {}
        self._bytes: dict[Job, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    @property
    def memory(self) -> int:
        """Bytes of memory that all plans take."""
        with self._mutex:
            return sum(self._bytes.values())

    def reserve(self, job: Job, accesses: int) -> bool:
        """Reserve the memory of a plan of so many accesses; return whether there is room.

        It is the job's until :meth:`leave`, also where it tells other plans later.
        """
        wanted = Coming.bytes(accesses, self._num_samples)
        with self._mutex:
            others = {other: size for other, size in self._bytes.items() if other != job}
            own = [size for (user, _), size in others.items() if user == job[0]]
            if len(others) >= MOST_PLANS or len(own) >= _OF_ONE * MOST_PLANS:
                return False
            if wanted + sum(others.values()) > self._most_bytes:
                return False
            if wanted + sum(own) > _OF_ONE * self._most_bytes:
                return False
            had = self._bytes.get(job, 0)
            if wanted > had and not self._admit(wanted - had):
                return False
            self._bytes[job] = max(wanted, had)
            return True

    def tell(self, job: Job, ids: Ids, length: int, is_last: bool) -> None:
        """Learn the plan of ``job``, for which memory is reserved; see :class:`Coming`."""
        with self._building:
            coming = Coming(ids, length, is_last, self._num_samples)
        with self._mutex:
            if job in self._jobs:
                coming.goes_on(self._jobs[job])
            self._jobs[job] = coming

    def take(self, job: Job, ids: Ids) -> bool:
        """Note that ``job`` has taken samples; return whether it has a plan."""
        with self._mutex:
            coming = self._jobs.get(job)
            if coming is not None:
                coming.take(ids)
            return coming is not None

    def pass_by(self, job: Job, position: int) -> Ids:
        """Note how far ``job`` is; return the samples of the accesses that are over."""
        with self._mutex:
            coming = self._jobs.get(job)
            if coming is None:
                return np.empty(0, np.uint32)
            return coming.pass_by(position, time.monotonic())

    def leave(self, job: Job) -> None:
        """Forget the plan of ``job``."""
        with self._mutex:
            self._jobs.pop(job, None)
            self._bytes.pop(job, None)

    def keys(self, ids: Ids, taken_by: Job | None = None) -> NDArray[np.float64]:
        """Return f64[n], minus the time at which any job uses each of ``ids`` u32[n] next.

        By the monotonic clock; -inf where there is no plan. As it is once ``taken_by`` has taken
        them, if that is given.
        """
        with self._mutex:
            if not self._jobs or not len(ids):
                return np.full(len(ids), -np.inf)
            now, jobs = time.monotonic(), list(self._jobs.items())
            uses = [
                coming.uses_after(ids) if job == taken_by else coming.uses(ids)
                for job, coming in jobs
            ]
            facts = [(each.position, each.pace(now), each.period) for _, each in jobs]
        positions, rates, periods = map(np.array, zip(*facts, strict=True))
        return -(now + soonest(np.stack(uses), positions, rates, periods))


class Last:
    """The samples in an arena that are used last, which are the first to leave.

    Looked at now and then, which costs little of the time. Not thread-safe.
    """

    def __init__(self, arena: Arena, sizes: NDArray[np.int64]) -> None:
        self._arena, self._sizes = arena, sizes
        self._keys = np.empty(0)  # ascending, as they leave
        self._ends = np.empty(0, np.int64)  # bytes of those and of all before
        self._gone = 0  # bytes that were given away since
        self._until = 0.0

    def forget(self) -> None:
        """Look again the next time."""
        self._until = 0.0

    def lose_to(self, ids: Ids, keys: NDArray[np.float64], room: int) -> NDArray[np.int64]:
        """Return i64[m], which of newcomers ``ids`` with ``keys`` f64[n] are to come in.

        As many as there is ``room`` for, in bytes, those first that are used soonest. Others take
        the room of what is used later, which then counts as gone.
        """
        order = np.argsort(-keys, kind="stable")
        ends = np.cumsum(self._sizes[ids[order]])
        needed = ends - max(0, room)
        fitting = int(np.searchsorted(needed, 0, "right"))
        if fitting == len(ids):
            return order
        self._look()
        victim = np.searchsorted(self._ends, needed[fitting:] + self._gone)
        is_there = victim < len(self._keys)
        beaten = np.full(len(victim), np.inf)
        beaten[is_there] = self._keys[victim[is_there]]
        beats = keys[order[fitting:]] > beaten
        count = fitting + (len(beats) if beats.all() else int(np.argmin(beats)))
        if count > fitting:
            self._gone += int(needed[count - 1])
        return order[:count]

    def _look(self) -> None:
        begin = time.monotonic()
        few = len(self._ends) and self._gone > self._ends[-1] // 2
        if begin < self._until and not few:
            return
        kept = self._arena.list("main")
        keys = self._arena.keys(kept)
        keys = np.where(np.isnan(keys), np.inf, keys)  # it left just now
        first = np.arange(len(kept))
        if len(kept) > _VICTIMS:
            first = np.argpartition(keys, _VICTIMS)[:_VICTIMS]
        first = first[np.argsort(keys[first])]
        self._keys, self._ends = keys[first], np.cumsum(self._sizes[kept[first]])
        self._gone = 0
        now = time.monotonic()
        self._until = now + max(_GLANCE, SELDOM * (now - begin))
