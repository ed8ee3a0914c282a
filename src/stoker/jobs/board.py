"""The board of the jobs that share one cache: a row for each, in memory that they share."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.jobs.metrics import PUBLISHED, WAIT_SECONDS
from stoker.node import descriptors
from stoker.node.locks import await_lock, is_locked, try_lock, unlock
from stoker.store.registry import Layout, open_arrays

_T = TypeVar("_T", bound=np.generic)
SLOTS = 512
"""Processes that share one cache and are known to each other; more of them go without."""

_IDLE = 30.0  # seconds without an access after which a job counts as slower
JOB = np.dtype(
    [
        ("token", "u8"),  # of the job, its ranks have the same; 0: no job
        ("is_dead", "i8"),  # whether its process was found to have ended without leaving
        ("kind", "i8"),
        ("since", "f8"),  # when it came
        ("pid", "i8"),
        ("noted", "f8"),  # when the position was written
        ("position", "i8"),  # accesses of the whole job so far
        ("rate", "f8"),  # accesses per second
        ("period", "f8"),  # accesses in an epoch
        ("gain", "f8"),  # iCache's benefit: time without the cache / time with it
        ("threshold", "f8"),  # gain from which its scores count
        ("request_bytes", "f8"),  # what it takes a request to cost beside its bytes
        ("is_probed", "i8"),
        ("fetch_seconds", "f8"),  # per batch, if all of it came from the source
        ("compute_seconds", "f8"),  # per batch
        ("probes_wanted", "i8"),  # of the headspace, so far; written by those who ask
        ("probes_done", "i8"),
        ("probe_batches", "i8"),  # held back for the latest
        ("probe_seconds", "f8"),  # that one of them took; 0: they were too few
        *((name, "f8") for name in PUBLISHED),  # counts since the job began
        ("waits", "i8", len(WAIT_SECONDS) + 1),  # of the training loop, by length
        ("name", "S64"),
    ]
)
"""One job, or one rank of it. Times are of the monotonic clock, which all processes share."""
HEAD = np.dtype([("kind", "i8"), ("base", "f8"), ("stamp", "u8"), ("looked", "f8"), ("next", "i8")])
"""Kind of the keys in the cache, and the time that weighted keys count from; a new random number
whenever jobs come, go or die; when it was last looked who lives, and where to look next."""
PREFIX = f"jobs {zlib.crc32(repr((SLOTS, HEAD.descr, JOB.descr)).encode()):08x}"
"""Begins the name under which the arrays are shared; who lays rows out otherwise has others."""
_GLANCE = 0.1  # seconds between two looks who lives, by whichever process comes first
_AT_A_GLANCE = 128  # rows looked at then, so that no batch waits for long
_DOOR = SLOTS  # the byte that is locked while a slot is taken
_PATIENCE = 5.0  # seconds for other jobs that are just coming in, hundreds at once


class Kind(IntEnum):
    """What the keys of a cache mean."""

    NONE = 0
    """The cache's own order, or what only one policy understands: nothing is merged."""
    TIME = 1
    """When samples are needed next."""
    SCORE = 2
    """What they are worth."""


def layout(num_samples: int) -> Layout:
    """Return the arrays of a board; pages that are not written take no memory."""
    return {
        "head": (HEAD.itemsize, "u1"),
        "jobs": (SLOTS * JOB.itemsize, "u1"),
        "next_use": (SLOTS * num_samples, "u4"),
        "value": (SLOTS * num_samples, "f4"),
    }


class Board:
    """The rows of all jobs that share a cache.

    ``live`` returns bool[SLOTS], the rows whose process lives; ``clock`` seconds. The arrays are
    those of :func:`layout`; see :meth:`of_its_own` for jobs in one process. Each field has one
    writer, so no lock is needed, and what is read while it is written costs a worse key at most.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        live: Callable[[], NDArray[np.bool_]],
        clock: Callable[[], float],
    ) -> None:
        self.head = arrays["head"].view(HEAD)[0:1]
        self.jobs = arrays["jobs"].view(JOB)
        self.next_use: NDArray[np.uint32] = arrays["next_use"].reshape(SLOTS, -1)
        """u32[SLOTS, N]: the access by which a job uses a sample next, modulo 2**32."""
        self.value: NDArray[np.float32] = arrays["value"].reshape(SLOTS, -1)
        """f32[SLOTS, N]: percentile of a sample within a job, in (0, 1]; 0: not seen."""
        self.live = live
        self.clock = clock
        self._owned = b"", np.empty(0, np.int64)  # who was there, and the slots found then

    @classmethod
    def of_its_own(cls, num_samples: int, clock: Callable[[], float]) -> Board:
        """Return a board in this process's memory, whose jobs live from :meth:`enter` on."""
        plain = {name: np.zeros(size, dtype) for name, (size, dtype) in layout(num_samples).items()}
        return cls(plain, lambda: plain["jobs"].view(JOB)["token"] > 0, clock)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.next_use[0])

    @property
    def kind(self) -> Kind:
        """What the keys in the cache mean."""
        return Kind(int(self.head["kind"][0]))

    def enter(
        self, slot: int, token: int, kind: Kind, name: str, pid: int, threshold: float
    ) -> None:
        """Give ``slot`` to a new job; if it is the only one, its kind of keys applies."""
        others = self.live().copy()
        others[slot] = False
        if not others.any():
            self.head["kind"], self.head["base"] = kind, self.clock()
        if self.kind is Kind.SCORE:  # unneeded pages are not touched
            self.value[slot] = 0
        row = np.zeros((), JOB)
        row["token"], row["kind"], row["pid"] = token, self.kind, pid
        row["gain"], row["threshold"], row["name"] = (
            1.0,
            threshold,
            name.encode()[: JOB["name"].itemsize],
        )
        row["since"] = self.clock()
        self.jobs[slot] = row
        renew(self.head)

    def leave(self, slot: int) -> None:
        """Take a job out."""
        self.jobs[slot] = np.zeros((), JOB)
        renew(self.head)

    def owners(self) -> NDArray[np.int64]:
        """Return the slots i64[J] of live jobs, of each its oldest. The oldest job comes first."""
        live = self.live()
        there = live.tobytes() + self.head["stamp"].tobytes()
        if there != self._owned[0]:  # asked for several times a batch, and jobs seldom change
            slots = np.flatnonzero(live)
            slots = slots[np.lexsort((slots, self.jobs["since"][slots]))]
            _, first = np.unique(self.jobs["token"][slots], return_index=True)
            slots = slots[np.sort(first)]
            slots.flags.writeable = False
            self._owned = there, slots
        return self._owned[1]

    def positions(self, slots: NDArray[np.int64], ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return i64[J, n]: the accesses by which jobs use ``ids`` next, not modulo anything."""
        now = self.jobs["position"][slots][:, None]
        ahead = _at(self.next_use, slots, ids) - now.astype(np.uint32)
        return np.asarray(now + ahead.view(np.int32))

    def values(self, slots: NDArray[np.int64], ids: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Return f32[J, n]: the percentiles of ``ids`` within jobs; 0: not seen."""
        return _at(self.value, slots, ids)

    def rates(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return f64[J], accesses per second; less for a job that has long been idle."""
        idle = np.maximum(self.clock() - self.jobs["noted"][slots], _IDLE)
        return np.asarray(self.jobs["rate"][slots] * _IDLE / idle)


def _at(table: NDArray[_T], slots: NDArray[np.int64], ids: NDArray[np.uint32]) -> NDArray[_T]:
    """Return ``table[slots][:, ids]``, but copy no whole rows; twice as fast as by two axes."""
    places = slots[:, None] * table.shape[1] + ids.astype(np.int64)
    return np.asarray(table.reshape(-1).take(places))


def renew(head: NDArray[np.void]) -> None:
    """Let all processes know that jobs came or went. Not counted: two at once would be one."""
    head["stamp"] = int.from_bytes(os.urandom(8))


class JobTable:
    """Who shares the cache ``key`` of ``num_samples`` samples, and what they say of themselves.

    Each process that takes a slot holds a lock for it that ends with the process however that
    ends, so that a dead job stops counting at once, and its slot can be taken by another. Forked
    children hold none. ``board`` stays readable after :meth:`close`. Also a context manager.

    One thread calls :meth:`take`. Raises :class:`OSError` where the memory's descriptor cannot be
    reopened (no ``/proc``), and what :func:`~stoker.store.registry.open_arrays` does.
    """

    def __init__(self, key: str, num_samples: int) -> None:
        self._arrays = open_arrays(f"{PREFIX} {key}", layout(num_samples))
        try:
            self._locks = descriptors.reopen(self._arrays["jobs"].fileno())
        except BaseException:
            self._arrays.close()
            raise
        self.is_shared = self._arrays.shared
        """False if other jobs cannot find it."""
        arrays: dict[str, NDArray[Any]] = {
            name: shared.array for name, shared in self._arrays.arrays.items()
        }
        self._lives = _Lives(self._locks, arrays["jobs"].view(JOB), arrays["head"].view(HEAD)[0:1])
        self.board = Board(arrays, self._lives, time.monotonic)

    @property
    def slot(self) -> int | None:
        """The slot of this process, once it has taken one."""
        return self._lives.own

    def take(self, token: int, kind: Kind, name: str, threshold: float) -> int | None:
        """Take a slot for the job ``token``, and return it; None when all are taken."""
        if not await_lock(self._locks.fileno(), _PATIENCE, every=0.005, start=_DOOR, length=1):
            return None
        try:
            jobs = self.board.jobs
            free = (jobs["token"] == 0) | (jobs["is_dead"] != 0)  # the others are held, most likely
            for slot in [*np.flatnonzero(free).tolist(), *np.flatnonzero(~free).tolist()]:
                if try_lock(self._locks.fileno(), start=slot, length=1):
                    self._lives.move(slot)
                    self.board.enter(slot, token, kind, name, os.getpid(), threshold)
                    self._lives.move(slot)
                    return slot
            return None
        finally:
            unlock(self._locks.fileno(), start=_DOOR, length=1)

    def close(self) -> None:
        """Leave; may be called again."""
        if self.slot is not None and self._locks.fileno() >= 0:
            self.board.leave(self.slot)
        self._lives.move(None)
        descriptors.drop(self._locks)
        self._arrays.close()

    def __enter__(self) -> JobTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Lives:
    """Whose process lives, of those that hold locks for their rows of ``jobs``.

    Calling it returns bool[SLOTS]: arrivals and departures are seen at once, a death within a tenth
    of a second, with more than 128 processes within a tenth for each 128. One process looks at the
    locks for all, and notes in the rows what it finds: if each looked, the cost would grow with the
    square of their number. Apart from the table, which so is freed when its last user goes.
    """

    def __init__(
        self, locks: descriptors.Descriptor, jobs: NDArray[np.void], head: NDArray[np.void]
    ) -> None:
        self.own: int | None = None
        self._locks, self._jobs, self._head = locks, jobs, head
        self._live: NDArray[np.bool_] | None = None
        self._stamp = 0  # as of which that is known

    def move(self, slot: int | None) -> None:
        """Take note of the slot of this process, and look again the next time."""
        self.own, self._live = slot, None

    def __call__(self) -> NDArray[np.bool_]:
        now = time.monotonic()
        is_time = not 0 <= now - float(self._head["looked"][0]) < _GLANCE
        if is_time and self._locks.fileno() >= 0:  # closed in children of a fork
            self._head["looked"] = now
            self._look()
        stamp = int(self._head["stamp"][0])
        if self._live is None or stamp != self._stamp:
            self._stamp = stamp
            self._live = (self._jobs["token"] > 0) & (self._jobs["is_dead"] == 0)
            self._live.flags.writeable = False
        return self._live

    def _look(self) -> None:
        """Look at the locks of the next rows, and mark those of the dead."""
        taken = np.flatnonzero(self._jobs["token"])
        start = int(self._head["next"][0]) if len(taken) > _AT_A_GLANCE else 0
        rows = np.roll(taken, -int(np.searchsorted(taken, start)))[:_AT_A_GLANCE]
        self._head["next"] = rows[-1] + 1 if len(rows) else 0
        was_dead = self._jobs["is_dead"][rows]
        for slot in rows.tolist():
            if slot == self.own:
                continue
            is_held = self._is_held(slot)
            self._jobs["is_dead"][slot] = not is_held
            # A new process may have taken the row since, and have written it before us.
            if not is_held and self._is_held(slot):
                self._jobs["is_dead"][slot] = False
        if (self._jobs["is_dead"][rows] != was_dead).any():
            renew(self._head)

    def _is_held(self, slot: int) -> bool:
        try:
            return is_locked(self._locks.fileno(), start=slot, length=1)
        except OSError:
            return True  # the program closed what is not its own: others will see
