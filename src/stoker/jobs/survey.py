"""The caches and jobs on this node, for people and monitoring."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

_COLUMNS = [list(JOB.names or ()).index(metric.field) for metric in COUNTS]


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
    """Waits of the training loop for batches, in the buckets of ``stoker.jobs.waits``."""

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
    folder = existing_runtime_dir()
    caches: list[tuple[int, Announcement, bool, int]] = []
    jobs: dict[str, list[JobInfo]] = {}
    for files in RendezvousFiles.all(folder) if folder else []:
        try:
            said, fds, pid = rendezvous.inquire(files.socket)
        except OSError:
            continue
        try:
            if said.kind == ARENA and fds:
                inode = os.fstat(fds[0].fileno()).st_ino
                caches.append((inode, said, len(fds) > 1, pid))
            elif said.kind == "arrays" and said.key.startswith(f"{PREFIX} "):
                with contextlib.suppress(OSError, ValueError, SegmentError):
                    jobs[said.key.rsplit(" ", 1)[1]] = _jobs(said, fds)
        finally:
            for fd in fds:
                descriptors.drop(fd)
    found = [
        CacheInfo(
            said.key,
            said.description,
            said.capacity_bytes,
            on_disk,
            said.stats,
            pid,
            jobs.get(str(inode), []),
        )
        for inode, said, on_disk, pid in caches
    ]
    return sorted(found, key=lambda cache: cache.key)


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


def _jobs(said: Announcement, fds: Sequence[Descriptor]) -> list[JobInfo]:
    """Return the live jobs of a table; ValueError or SegmentError if it is none."""
    fd = fds[list(said.meta["arrays"]).index("jobs")].fileno()
    is_ours = said.meta["arrays"]["jobs"][0] == SLOTS * JOB.itemsize
    if not is_ours or os.fstat(fd).st_size < SLOTS * JOB.itemsize:
        raise SegmentError("the table of jobs is another version's")
    table = SharedArray.attach(fd, SLOTS, JOB, "stoker-jobs").array
    taken = np.flatnonzero(table["token"]).tolist()
    rows = table[[slot for slot in taken if is_locked(fd, start=slot, length=1)]]
    rows = rows[np.argsort(rows["since"], kind="stable")]
    groups = [rows[rows["token"] == t] for t in dict.fromkeys(rows["token"].tolist())]
    if not groups:
        return []
    first = np.stack([group[0] for group in groups])
    rates = known_rates(first["rate"])
    eligible = counted(first["gain"], first["threshold"])
    return [
        JobInfo(
            name=bytes(group["name"][0]).decode(errors="replace"),
            pid=int(group["pid"][0]),
            processes=len(group),
            kind=Kind(int(group["kind"][0])).name.lower(),
            **{
                name: int(group[name].sum())
                for name in ("accesses", "hits", "fetched", "bytes_from_source")
            },
            rate=float(group["rate"][0]),
            share=float(rates[at] / rates.sum()),
            benefit=float(group["gain"][0]),
            probed=bool(group["is_probed"][0]),
            eligible=bool(eligible[at]),
            fetch_seconds=float(group["fetch_seconds"][0]),
            compute_seconds=float(group["compute_seconds"][0]),
            counts=_counts(group),
            waits=group["waits"].sum(axis=0).tolist(),
        )
        for at, group in enumerate(groups)
    ]


def _counts(group: NDArray[Any]) -> dict[str, float]:
    """Return what the ranks of a job counted together."""
    rows = group.tolist()  # plain numbers: a sum by NumPy for each field takes far longer
    return {
        metric.field: (max if metric.of_node else sum)(row[column] for row in rows)
        for metric, column in zip(COUNTS, _COLUMNS, strict=True)
    }
