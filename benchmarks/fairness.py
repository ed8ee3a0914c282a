"""Four jobs with weights 4:2:1:1 share fetch bandwidth and the memory of a cache.

Parts (``--part``, all by default):

- bandwidth: four data sets with a cache each, behind storage that yields more than
  ``stoker serve --bandwidth`` permits. The heaviest job pauses for a while and comes back.
- memory: one data set and one cache, each job with ``Sharing(by_weight=True)``; likewise.
- caches: four data sets with a cache each, of which any would take all the memory of
  ``stoker serve --memory``; a quota for each job, which may borrow (``most``); likewise.

Jobs are processes, each with its prefetch. ``worst`` is the largest deviation of a job from its
share, as a share of that; ``of_limit`` what all read / the limit, which the hits of a cache of 5 %
may take above 1. ``used_s``: from the pause until the others have all but 5 % of what is
divided; ``back_s``: from the end of the pause until the job has all but 5 % of its share. Of
bandwidth, that is over the second that follows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
        _jobs(sources, "5%", by_weight=False) as (read, may_read),
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
    with _jobs([source] * len(WEIGHTS), "20%", by_weight=True) as (_, may_read):
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
    span = 2.0 if smoke else 6.0
    count = 600 if smoke else 1_200
    sources = [_source(number, count, 10 * SIZE) for number in range(len(WEIGHTS))]
    settings = ServiceSettings(
        memory=(memory := int(sources[0].sizes.sum())),
        quotas=tuple(
            Quota(f"job {number}", int(share * memory), most=memory)
            for number, share in enumerate(SHARES)
        ),
    )
    with _serving(settings), _jobs(sources, "100%", by_weight=False) as (_, may_read):
        _await(lambda: _of_caches("memory_bytes").sum() > 0.95 * memory)
        # What is kept for reading ahead need not fill up.
        _await(lambda: _of_caches("payload_bytes").sum() > 0.8 * _of_caches("limit_bytes").sum())
        time.sleep(span)
        got, held = _of_caches("memory_bytes"), _of_caches("payload_bytes")
        may_read[0].clear()
        idle = _watched(lambda: _of_caches("payload_bytes"), span)
        may_read[0].set()
        back = _watched(lambda: _of_caches("payload_bytes"), span)
    return {
        "worst": float(np.abs(got / memory / SHARES - 1).max()),
        **_named("share", got / memory),
        "of_limit": float(got.sum()) / memory,
        "used_s": _first(idle[:, 1:].sum(axis=1) >= 0.95 * held.sum()),
        "back_s": _first(back[:, 0] >= 0.95 * held[0]),
    }


PARTS: dict[str, Callable[[bool], dict[str, float]]] = {
    "bandwidth": bandwidth,
    "memory": memory,
    "caches": caches,
}
LIMITS = {"bandwidth": 0.10, "memory": 0.05, "caches": 0.05}


def _of_caches(field: str) -> Floats:
    """Return a counter of each job's cache."""
    found = np.zeros(len(WEIGHTS))
    for cache in survey():
        for job in cache.jobs:
            found[int(job.name.split()[-1])] = cache.stats.get(field, 0)
    return found


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
    sources: list[SlowSource], cache: str, *, by_weight: bool
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
                work = (number, source, Cache(cache, sharing=sharing), read, may_read, is_over)
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
