"""Four jobs with weights 4:2:1:1 share fetch bandwidth, the memory of a cache, and disk.

Parts (``--part``, all by default):

- bandwidth: four data sets with a cache each, behind storage that yields more than
  ``stoker serve --bandwidth`` permits. The heaviest job pauses for a while and comes back.
- memory: one data set and one cache, each job with ``Sharing(by_weight=True)``; likewise.
- caches: four data sets with a cache each, of which any would take all the memory of
  ``stoker serve --memory``; a quota for each job, which may borrow (``most``); likewise.
- disk: the same of disk (``stoker serve --disk``, ``disk_most``), with hardly any memory. What the
  file system says of the files is in ``of_disk``, as a share of the limit.

Jobs are processes, each with its prefetch. ``worst`` is the largest deviation of a job from its
share, as a share of that; ``of_limit`` what all read / the limit, which the hits of a cache of 5 %
may take above 1. ``used_s``: from the pause until the others have all but 5 % of what is
divided; ``back_s``: from the end of the pause until the job has all but 5 % of its share. Of
bandwidth, that is over the second that follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from feed_process import Running
from harness import Report, own_runtime, parser, show
from numpy.typing import NDArray

from stoker import Cache, Feed
from stoker.jobs import Sharing
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service, ServiceSettings
from stoker.jobs.survey import survey
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
from stoker.store.registry import list_arenas
from stoker.testing.sources import SlowSource

WEIGHTS = np.array([4.0, 2.0, 1.0, 1.0])
SHARES = WEIGHTS / WEIGHTS.sum()
SIZE, BATCH, RATE = 4_000, 20, 8_000_000
LOOK = 0.05  # seconds
MEMORY, DISK = "memory_bytes", "disk_bytes"
Floats = NDArray[np.float64]


def main() -> None:
    """Parse the arguments, run the parts, print a report for each."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.set_defaults(rounds=3)
    args = arguments.parse_args()
    for name in args.part:
        report = Report(f"Fairness: {name}", args.smoke)
        rounds = [PARTS[name](args.smoke) for _ in range(1 if args.smoke else args.rounds)]
        for figures in rounds:
            report.row(**figures)
        worst, used, back = (max(f[key] for f in rounds) for key in ("worst", "used_s", "back_s"))
        report.target(f"worst deviation from a share of {name}", worst, LIMITS[name])
        report.target("until an idle job's share is used", used, 2.0, "s")
        report.target("until it is returned", back, 5.0, "s")
        show(args, report, part=name)


def bandwidth(smoke: bool) -> dict[str, float]:
    """Return the figures of a round in which jobs fetch over a limited link."""
    span = 1.0 if smoke else 6.0
    sources = [_source(number, 2_000) for number in range(len(WEIGHTS))]
    with (
        _serving(ServiceSettings(bandwidth=RATE)),
        _jobs(sources, [Cache("5%")] * 4) as (read, may_read),
    ):
        _await(lambda: bool((read > 0).all()))
        time.sleep(span / 3)
        before, begin = read.copy(), time.monotonic()
        time.sleep(span)
        got = (read - before).astype(np.float64)
        rate = float(got.sum()) / (time.monotonic() - begin)
        got /= got.sum()
        may_read[0].clear()
        idle = _watched(read.copy, span)
        may_read[0].set()
        back = _watched(read.copy, span)
    return {
        "worst": float(np.abs(got / SHARES - 1).max()),
        **_named("share", got),
        "of_limit": rate / RATE,
        "used_s": _first(_rates(idle)[:, 1:].sum(axis=1) >= 0.95 * RATE),
        "back_s": _first(_rates(back)[:, 0] >= 0.95 * RATE * SHARES[0]),
    }


def memory(smoke: bool) -> dict[str, float]:
    """Return the figures of a round in which jobs divide the memory of one cache."""
    span = 1.0 if smoke else 6.0
    source = _source(0, 2_000 if smoke else 10_000)
    with _jobs([source] * 4, [Cache("20%")] * 4, by_weight=True) as (_, may_read):
        _await(lambda: _held().sum() > 0.9 * 0.2 * source.sizes.sum())
        time.sleep(span)
        held = _held()
        whole = float(held.sum())
        may_read[0].clear()
        idle = _watched(_held, span)
        may_read[0].set()
        back = _watched(_held, span)
    return {
        "worst": float(np.abs(held / whole / SHARES - 1).max()),
        **_named("share", held / whole),
        "used_s": _first(idle[:, 1:].sum(axis=1) >= 0.95 * whole),
        "back_s": _first(back[:, 0] >= 0.95 * whole * SHARES[0]),
    }


def caches(smoke: bool) -> dict[str, float]:
    """Return the figures of a round in which caches of different data lend each other memory."""
    sources = _sources(600 if smoke else 1_200)
    settings = ServiceSettings(
        memory=(memory := int(sources[0].sizes.sum())),
        quotas=tuple(
            Quota(f"job {number}", int(share * memory), most=memory)
            for number, share in enumerate(SHARES)
        ),
    )
    with _serving(settings), _jobs(sources, [Cache("100%")] * 4) as (_, may_read):
        return _lent(memory, MEMORY, may_read, 2.0 if smoke else 6.0)


def disk(smoke: bool) -> dict[str, float]:
    """Return the figures of a round in which caches of different data lend each other disk."""
    sources = _sources(600 if smoke else 3_000)
    settings = ServiceSettings(
        disk=(whole := int(sources[0].sizes.sum())),
        quotas=tuple(
            Quota(f"job {number}", disk=int(share * whole), disk_most=whole)
            for number, share in enumerate(SHARES)
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(number)) for number in range(len(WEIGHTS))]
        # Of memory there is little, that hits are the disk's; the file takes more than the payload.
        kept = [Cache("5%", disk=place, disk_size="95%") for place in places]
        with _serving(settings), _jobs(sources, kept) as (_, may_read):
            figures = _lent(whole, DISK, may_read, 2.0 if smoke else 6.0)
            files = [file for place in places for file in place.iterdir()]
            taken = sum(file.stat().st_blocks * 512 for file in files)
    return {**figures, "of_disk": taken / whole}


def _lent(whole: int, place: str, may_read: list[Any], span: float) -> dict[str, float]:
    """Return the figures of caches that lend each other ``whole`` bytes of memory or disk."""

    def held() -> Floats:
        return _of_caches("payload_bytes", place)

    _await(lambda: _of_caches(place, place).sum() > 0.95 * whole)
    # What is kept for reading ahead need not fill up.
    _await(lambda: held().sum() > 0.8 * _of_caches("limit_bytes", place).sum())
    time.sleep(span)
    got, before = _of_caches(place, place), held()
    may_read[0].clear()
    idle = _watched(held, span)
    may_read[0].set()
    back = _watched(held, span)
    return {
        "worst": float(np.abs(got / whole / SHARES - 1).max()),
        **_named("share", got / whole),
        "of_limit": float(got.sum()) / whole,
        "used_s": _first(idle[:, 1:].sum(axis=1) >= 0.95 * before.sum()),
        "back_s": _first(back[:, 0] >= 0.95 * before[0]),
    }


PARTS: dict[str, Callable[[bool], dict[str, float]]] = {
    "bandwidth": bandwidth,
    "memory": memory,
    "caches": caches,
    "disk": disk,
}
LIMITS = {"bandwidth": 0.10, "memory": 0.05, "caches": 0.05, "disk": 0.05}


def _of_caches(field: str, place: str) -> Floats:
    """Return a counter of each job's cache, ``place``: of that in memory, or on disk."""
    found = np.zeros(len(WEIGHTS))
    for cache in survey():
        if place == DISK and cache.on_disk:
            found[int(Path(cache.description).name)] = cache.stats.get(field, 0)
        elif place == MEMORY:
            for job in cache.jobs:
                found[int(job.name.split()[-1])] = cache.stats.get(field, 0)
    return found


def _sources(count: int) -> list[SlowSource]:
    return [_source(number, count, 10 * SIZE) for number in range(len(WEIGHTS))]


def _source(number: int, count: int, size: int = SIZE) -> SlowSource:
    rng = np.random.default_rng(number)
    samples = [rng.bytes(size) for _ in range(count)]
    return SlowSource(MemorySource(samples), latency=0.0005, bandwidth=60e6)


@contextlib.contextmanager
def _serving(settings: ServiceSettings) -> Iterator[None]:
    with own_runtime(), Service(settings) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        yield
        service.stop()
        thread.join()


@contextlib.contextmanager
def _jobs(
    sources: list[SlowSource], caches: list[Cache], *, by_weight: bool = False
) -> Iterator[tuple[NDArray[np.int64], list[Any]]]:
    """Run a job on each source; gives the bytes that each has read, live, and who may read."""
    context = multiprocessing.get_context("spawn")
    is_over, read = context.Event(), SharedArray.create(len(sources), np.int64, "read")
    may_read = [context.Event() for _ in sources]
    running = []
    with own_runtime() if by_weight else contextlib.nullcontext():
        try:
            for number, source in enumerate(sources):
                may_read[number].set()
                sharing = Sharing(f"job {number}", weight=WEIGHTS[number], by_weight=by_weight)
                cache = dataclasses.replace(caches[number], sharing=sharing)
                work = (number, source, cache, read, may_read, is_over)
                running.append(Running(train, work))
                _await(lambda: read.array[number] > 0)  # noqa: B023
            yield read.array, may_read
        finally:
            is_over.set()
            for event in may_read:
                event.set()
            for each in running:
                each.result()


def train(
    number: int,
    source: SlowSource,
    cache: Cache,
    read: SharedArray,
    may_read: list[Any],
    is_over: Any,
) -> dict[str, Any]:
    """Be one job: iterate until it is over, and say what was read."""
    with Feed(source, BATCH, cache=cache, recipe="lru", seed=number, decode_threads=2) as feed:
        while not is_over.is_set():
            for _ in feed:
                read.array[number] += BATCH * int(source.sizes[0])
                may_read[number].wait()
                if is_over.is_set():
                    break
    return {}


def _held() -> Floats:
    """Return the bytes that the jobs' parts of the cache hold."""
    for arena in list_arenas():
        regions = arena.stats.get("regions", {})
        parts = [regions.get(f"job {number}") for number in range(len(WEIGHTS))]
        if all(parts):
            return np.array([float(part["bytes"]) for part in parts if part])
    return np.zeros(len(WEIGHTS))


def _await(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the jobs do not get on: see their output")
        time.sleep(LOOK)


def _watched(look: Callable[[], NDArray[Any]], seconds: float) -> Floats:
    """Return what is seen every now and then, f64[looks, jobs]."""
    begin, seen = time.monotonic(), []
    while time.monotonic() < begin + seconds:
        seen.append(look())
        time.sleep(max(0.0, begin + len(seen) * LOOK - time.monotonic()))
    return np.array(seen, np.float64)


def _rates(seen: Floats) -> Floats:
    """Return the bytes a second over the second that follows each look."""
    looks = round(1 / LOOK)
    return seen[looks:] - seen[:-looks]


def _first(reached: NDArray[np.bool_]) -> float:
    """Return after how many seconds that was so first; infinity if never."""
    found = np.flatnonzero(reached)
    return float(found[0]) * LOOK if found.size else float("inf")


def _named(name: str, values: Floats) -> dict[str, float]:
    return {f"{name}_{number}": float(value) for number, value in enumerate(values)}


if __name__ == "__main__":
    main()
