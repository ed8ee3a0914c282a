"""Running jobs in figures, as `stoker top`, doctor and the page of `stoker serve` show them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoker.epoch.stats import Stats, bound_of, headspace_of, shares_of
from stoker.errors import ConfigError, StokerError
from stoker.jobs.http_server import WebServer
from stoker.jobs.metrics import COUNTS, quantile
from stoker.jobs.survey import Watch
from stoker.types import format_bytes

_WINDOW = 10.0  # seconds that figures are taken over
_LEAST = 5.0  # seconds; jobs publish once a second, and a batch may take longer
_TOO_OLD = 3 * _WINDOW  # seconds, after a pause in looking
_OF_NOW = frozenset(metric.field for metric in COUNTS if metric.kind == "gauge")
_OF_NODE = frozenset(metric.field for metric in COUNTS if metric.of_node)
_ZERO = Stats()
NO_JOB = (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""Raised for what is no job."""
Job = Mapping[str, Any]


@dataclass(frozen=True)
class JobView:
    """One job as it is shown. Shares are from 0 to 1, rates per second, times in seconds."""

    name: str
    pid: int
    data: str
    """What it reads."""
    processes: int
    rate: float
    """Samples."""
    stall: float
    """Share of the time that training waited."""
    hits: float
    """Share of the samples, those from disk and pool included."""
    from_memory: float
    from_disk: float
    from_pool: float
    substituted: float
    packaged: float
    reads: float
    """Samples read from the source."""
    read_bytes: float
    """Bytes from the source."""
    wait_p50: float
    wait_p99: float
    """For a batch."""
    bound: str
    """start-up, compute, storage or decode; idle if no batch came lately."""
    stages: dict[str, float]
    """Share of the time for each of these; empty before a batch came."""
    headspace: float
    """How many times as fast it would run if data were free: an estimate."""
    verdict: str
    """What would help."""


class Column(NamedTuple):
    """A column of the table of jobs."""

    title: str
    field: str
    """By which it sorts."""
    key: str
    """That sorts by it in a terminal."""
    write: Callable[[JobView], str]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


COLUMNS = (
    Column("job", "name", "n", lambda view: view.name),
    Column("samples/s", "rate", "r", lambda view: f"{view.rate:,.0f}"),
    Column("waits", "stall", "w", lambda view: f"{view.stall:.0%}"),
    Column("hits", "hits", "h", lambda view: f"{view.hits:.1%}"),
    Column("reads/s", "reads", "s", lambda view: f"{view.reads:,.0f}"),
    Column("source/s", "read_bytes", "b", lambda view: format_bytes(view.read_bytes)),
    Column("p50", "wait_p50", "5", lambda view: _time(view.wait_p50)),
    Column("p99", "wait_p99", "9", lambda view: _time(view.wait_p99)),
    Column("bound by", "bound", "o", lambda view: view.bound),
)
"""Those of the table, which fits into 80 columns."""


def facts(view: JobView) -> dict[str, str]:
    """Return all of a job as it is written, by name."""
    return {
        "data": view.data,
        "process": f"{view.pid}, {view.processes} of this job here",
        "samples/s": f"{view.rate:,.1f}",
        "training waits": f"{view.stall:.1%} of the time",
        "hits": f"{view.hits:.1%} (memory {view.from_memory:.1%}, disk {view.from_disk:.1%}, "
        f"pool {view.from_pool:.1%})",
        "substituted": f"{view.substituted:.1%}",
        "packaged": f"{view.packaged:.1%}",
        "source": f"{view.reads:,.1f} reads/s, {format_bytes(view.read_bytes)}/s",
        "wait for a batch": f"p50 {_time(view.wait_p50)}, p99 {_time(view.wait_p99)}",
        "bound by": view.bound,
        "time": ", ".join(f"{name} {share:.0%}" for name, share in view.stages.items()),
        "if data were free": f"{view.headspace:.2f} times as fast (an estimate)",
    }


def view_of(data: str, job: Job, earlier: Job | None = None) -> JobView:
    """Return how ``job`` did since ``earlier``; since it began where that is None.

    Raises one of :data:`NO_JOB` for what is no job.
    """
    counts = _since(job["counts"], {} if earlier is None else earlier["counts"])
    waits = [int(count) for count in job["waits"]]
    if earlier is not None:
        waits = [now - before for now, before in zip(waits, earlier["waits"], strict=True)]
    stats = _mean_rank(counts, job["processes"])
    samples = max(1.0, counts["accesses"])
    seconds = stats.epoch_seconds
    below = counts["disk_hits"] + counts["pool_hits"]
    return JobView(
        name=printable(str(job["name"])),
        pid=int(job["pid"]),
        data=printable(data),
        processes=int(job["processes"]),
        rate=counts["accesses"] / seconds if seconds > 0 else 0.0,
        stall=stats.stall_share,
        hits=counts["hits"] / samples,
        from_memory=max(0.0, counts["hits"] - below) / samples,
        from_disk=counts["disk_hits"] / samples,
        from_pool=counts["pool_hits"] / samples,
        substituted=counts["substituted"] / samples,
        packaged=counts["packaged"] / samples,
        reads=(counts["read"] + counts["read_ahead"]) / seconds if seconds > 0 else 0.0,
        read_bytes=counts["bytes_from_source"] / seconds if seconds > 0 else 0.0,
        wait_p50=quantile(waits, 0.5),
        wait_p99=quantile(waits, 0.99),
        bound="idle" if earlier is not None and not counts["accesses"] else bound_of(stats),
        stages={str(name): share for name, share in shares_of(stats).items()},
        headspace=headspace_of(stats),
        verdict=stats.verdict,
    )


def printable(text: str) -> str:
    """Return text without control characters, which could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {
        metric.field: now[metric.field]
        - (0 if metric.field in _OF_NOW else before.get(metric.field, 0))
        for metric in COUNTS
    }


def _mean_rank(counts: Mapping[str, float], processes: int) -> Stats:
    """Return the counts of a mean rank, as a verdict is about one rank's time."""
    mean = {
        name: value if name in _OF_NODE else value / processes for name, value in counts.items()
    }
    values: dict[str, Any] = {name: type(getattr(_ZERO, name))(v) for name, v in mean.items()}
    return Stats(**values)


class History:
    """What jobs published in the last seconds, so that figures are of now."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, dict[Any, Job]]] = deque()

    def add(self, caches: Sequence[Mapping[str, Any]], now: float) -> list[JobView]:
        """Take in what was published at ``now`` seconds; return the jobs as they are.

        Raises as :func:`view_of` does.
        """
        jobs = {
            (cache["key"], job["name"], job["pid"]): (cache["description"] or cache["key"], job)
            for cache in caches
            for job in cache["jobs"]
        }
        if self._taken and self._taken[-1][0] < now - _TOO_OLD:
            self._taken.clear()
        while len(self._taken) > 1 and self._taken[1][0] <= now - _WINDOW:
            self._taken.popleft()
        is_old = bool(self._taken) and self._taken[0][0] <= now - _LEAST
        before = self._taken[0][1] if is_old else {}
        self._taken.append((now, {key: job for key, (_, job) in jobs.items()}))
        return [view_of(data, job, before.get(key)) for key, (data, job) in jobs.items()]


class Frames:
    """Makes a frame of the page, of what ``look`` finds. For one thread at a time."""

    def __init__(self, look: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._look = look
        self._history = History()

    def __call__(self) -> str:
        """Return the jobs as they are now, as JSON on one line; StokerError if they are none."""
        try:
            views = self._history.add(self._look(), time.monotonic())
            columns = [{"title": column.title, "field": column.field} for column in COLUMNS]
            return json.dumps(
                {"columns": columns, "jobs": [_shown(view) for view in views]}, allow_nan=False
            )
        except NO_JOB as error:
            raise StokerError(f"jobs have published what is no count: {error!r}") from error


def _shown(view: JobView) -> dict[str, Any]:
    return {
        "id": f"{view.data} {view.name} {view.pid}",
        "cells": [column.write(view) for column in COLUMNS],
        "sort": {column.field: getattr(view, column.field) for column in COLUMNS},
        "kinds": {
            "memory": view.from_memory,
            "disk": view.from_disk,
            "pool": view.from_pool,
            "substituted": view.substituted,
            "packaged": view.packaged,
        },
        "stages": view.stages,
        "facts": facts(view),
        "verdict": view.verdict,
    }


@contextmanager
def serving_page(where: str, group: int | None) -> Iterator[WebServer]:
    """Serve the page of this user's jobs at a port or socket, in a thread, within the context.

    Raises :class:`~stoker.errors.ConfigError` if it cannot be served there.
    """
    at = int(where) if where.isdecimal() else Path(where)
    if isinstance(at, int) and at > 65535:
        raise ConfigError(f"web={at} is no port: give 0 to 65535, or the path of a socket")
    watch = Watch()
    server = WebServer(at, Frames(lambda: [cache.told() for cache in watch.look()]), group=group)
    threading.Thread(target=server.run, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
