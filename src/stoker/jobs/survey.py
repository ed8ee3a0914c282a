"""The caches and jobs on this node, for people and monitoring."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SegmentError
from stoker.jobs.board import JOB, PREFIX, SLOTS, Kind
from stoker.jobs.merged import counted, known_rates
from stoker.jobs.metrics import COUNTS
from stoker.node import descriptors, rendezvous
from stoker.node.descriptors import Descriptor
from stoker.node.locks import is_locked
from stoker.node.messages import OtherVersion
from stoker.node.rendezvous import Announcement, RendezvousFiles
from stoker.node.runtime_dir import existing_runtime_dir
from stoker.shared import SharedArray
from stoker.store.registry import ARENA

_FIELDS = JOB.names or ()
_GAINS = "gain", "threshold"
_LOOK_AGAIN = 0.05  # seconds between two looks whether a probe is over


@dataclass(frozen=True)
class JobInfo:
    """What a job has published, its ranks on this node together."""

    name: str
    pid: int
    """Of its first process here, in that one's own namespace."""
    processes: int
    kind: str
    """Of its keys: "time", "score", or "none" where the cache orders samples itself."""
    accesses: int
    hits: int
    fetched: int
    bytes_from_source: int
    rate: float
    """Accesses per second."""
    share: float
    """Of the accesses per second of all jobs at this cache."""
    benefit: float
    """Time of a batch without the cache / with it; measured by trying if ``probed``."""
    probed: bool
    eligible: bool
    """Whether its scores count."""
    fetch_seconds: float
    """That reading a whole batch would take; 0 if not known."""
    compute_seconds: float
    """That a batch takes without waiting."""
    counts: dict[str, float]
    """By the names of :data:`~stoker.jobs.metrics.PUBLISHED`, of its ranks here together."""
    waits: list[int]
    """Waits of the training loop for batches, in the buckets of ``stoker.jobs.metrics``."""

    def told(self) -> dict[str, Any]:
        """Return it as a dictionary, which shares its values: ``asdict`` takes long to copy."""
        return dict(vars(self))


@dataclass(frozen=True)
class CacheInfo:
    """A live cache, and the jobs that use it."""

    key: str
    description: str
    """Its creator's description, for example the data set's root."""
    capacity_bytes: int
    on_disk: bool
    stats: dict[str, Any]
    """The arena's counters, empty if they were unavailable."""
    pid: int
    """The process that answers for it; 0 if that lives in another process namespace."""
    jobs: list[JobInfo] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """Return it and its jobs as dictionaries, which share its values."""
        return {**vars(self), "jobs": [job.told() for job in self.jobs]}


def survey() -> list[CacheInfo]:
    """Return this user's live caches that answer, sorted by key."""
    return Watch().look()


class Watch:
    """The live caches and jobs of this user, for who looks again and again.

    Each holder is asked once, for as long as it has the same memory: the tables of jobs stay
    mapped. So the counters of a cache are those of the first look at it. For one thread at a time.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[object, _Found]] = {}  # by name, with the state of its files

    def look(self) -> list[CacheInfo]:
        """Return the caches that are there now, sorted by key, with what their jobs published."""
        folder = existing_runtime_dir()
        before, self._found = self._found, {}
        for files in RendezvousFiles.all(folder) if folder else []:
            state = files.state()
            known = before.get(files.name)
            if known is not None and known[0] == state:
                self._found[files.name] = known
            elif state is not None:
                with contextlib.suppress(OSError):
                    self._found[files.name] = state, _found_at(files)
        found = [each for _, each in self._found.values()]
        jobs = {}
        for table in [each.table for each in found if each.table is not None]:
            with contextlib.suppress(OSError, ValueError):  # of rows that are none
                jobs[table.cache] = table.jobs()
        caches = [
            CacheInfo(
                each.said.key,
                each.said.description,
                each.said.capacity_bytes,
                each.on_disk,
                each.said.stats,
                each.pid,
                jobs.get(each.inode, []),
            )
            for each in found
            if each.inode
        ]
        return sorted(caches, key=lambda cache: cache.key)

    def probe(self, job: JobInfo, patience: float) -> Probed | None:
        """Have the headspace of a job measured, in all its ranks here; see ``jobs/gain.py``.

        None if it has not done so within ``patience`` seconds; it is not asked to any more then.
        """
        tables = [each.table for _, each in self._found.values() if each.table is not None]
        rows = [row for table in tables for row in table.rows_of(job)]
        wanted = [int(row["probes_done"]) + 1 for row in rows]
        for row, number in zip(rows, wanted, strict=True):
            row["probes_wanted"] = number
        deadline = time.monotonic() + patience
        while any(row["probes_done"] < number for row, number in zip(rows, wanted, strict=True)):
            if time.monotonic() >= deadline:
                for row in rows:
                    row["probes_wanted"] = row["probes_done"]
                return None
            time.sleep(_LOOK_AGAIN)
        if not rows:
            return None
        batches = min(int(row["probe_batches"]) for row in rows)
        seconds = [float(row["probe_seconds"]) for row in rows]
        return Probed(batches, max(seconds) if all(seconds) else 0.0)


class Probed(NamedTuple):
    """What a probe found."""

    batches: int
    """That each rank held back, at least."""
    seconds: float
    """That a batch takes where data is free; 0: the batches were too few to tell."""


def count_of_other_versions() -> int:
    """Return how many memories jobs of other versions of Stoker share, which cannot be read."""
    folder = existing_runtime_dir()
    found = 0
    for files in RendezvousFiles.all(folder) if folder else []:
        with contextlib.suppress(OSError):
            try:
                for fd in rendezvous.inquire(files.socket)[1]:
                    descriptors.drop(fd)
            except OtherVersion:
                found += 1
    return found


class _Table:
    """A table of jobs, mapped. Raises ValueError, OSError or SegmentError if it is none."""

    def __init__(self, said: Announcement, fds: Sequence[Descriptor]) -> None:
        fd = fds[list(said.meta["arrays"]).index("jobs")].fileno()
        is_ours = said.meta["arrays"]["jobs"][0] == SLOTS * JOB.itemsize
        if not is_ours or os.fstat(fd).st_size < SLOTS * JOB.itemsize:
            raise SegmentError("the table of jobs is another version's")
        self._shared = SharedArray.attach(fd, SLOTS, JOB, "stoker-jobs")
        self.cache = int(said.key.rsplit(" ", 1)[1])
        """The inode of the cache that the jobs share."""

    def jobs(self) -> list[JobInfo]:
        """Return the live jobs, the oldest first."""
        table, fd = self._shared.array, self._shared.fileno()
        taken = table["token"].nonzero()[0].tolist()
        # As plain numbers: NumPy takes far longer for so few.
        rows = [
            dict(zip(_FIELDS, table[slot].item(), strict=True))
            for slot in taken
            if _lives(fd, slot)
        ]
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["since"]):
            groups.setdefault(row["token"], []).append(row)
        if not groups:
            return []
        first = [group[0] for group in groups.values()]
        rates = known_rates(np.array([row["rate"] for row in first]))
        eligible = counted(*(np.array([row[name] for row in first]) for name in _GAINS))
        whole = float(rates.sum())
        return [
            _job(group, share=float(rates[at]) / whole, eligible=bool(eligible[at]))
            for at, group in enumerate(groups.values())
        ]

    def rows_of(self, job: JobInfo) -> list[NDArray[np.void]]:
        """Return the rows of the live ranks of a job, as they are in the shared memory."""
        table, fd = self._shared.array, self._shared.fileno()
        rows = [table[slot] for slot in table["token"].nonzero()[0].tolist() if _lives(fd, slot)]
        first = [row for row in rows if row["pid"] == job.pid and _name_of(row) == job.name]
        return [row for row in rows if first and row["token"] == first[0]["token"]]


def _lives(fd: int, slot: int) -> bool:
    return is_locked(fd, start=slot, length=1)


def _name_of(row: NDArray[np.void]) -> str:
    return bytes(row["name"]).decode(errors="replace")


@dataclass(frozen=True)
class _Found:
    """What a holder said, and the table of jobs if it is one."""

    said: Announcement
    pid: int
    inode: int = 0
    """Of the memory, if it is a cache."""
    on_disk: bool = False
    table: _Table | None = None


def _found_at(files: RendezvousFiles) -> _Found:
    """Ask who answers there; OSError if no Stoker of this version does."""
    said, fds, pid = rendezvous.inquire(files.socket)
    try:
        if said.kind == ARENA and fds:
            return _Found(said, pid, os.fstat(fds[0].fileno()).st_ino, len(fds) > 1)
        if said.kind == "arrays" and said.key.startswith(f"{PREFIX} "):
            with contextlib.suppress(OSError, ValueError, SegmentError):
                return _Found(said, pid, table=_Table(said, fds))
        return _Found(said, pid)
    finally:
        for fd in fds:
            descriptors.drop(fd)


def _job(group: Sequence[dict[str, Any]], *, share: float, eligible: bool) -> JobInfo:
    """Return what the ranks of a job published, of which the first says what is said once."""
    first = group[0]
    return JobInfo(
        name=first["name"].decode(errors="replace"),
        pid=first["pid"],
        processes=len(group),
        kind=Kind(first["kind"]).name.lower(),
        **{
            name: int(sum(row[name] for row in group))
            for name in ("accesses", "hits", "fetched", "bytes_from_source")
        },
        rate=first["rate"],
        share=share,
        benefit=first["gain"],
        probed=bool(first["is_probed"]),
        eligible=eligible,
        fetch_seconds=first["fetch_seconds"],
        compute_seconds=first["compute_seconds"],
        counts={
            metric.field: (max if metric.of_node else sum)(row[metric.field] for row in group)
            for metric in COUNTS
        },
        waits=np.sum([row["waits"] for row in group], axis=0).tolist(),
    )
