"""Several jobs on one node over one data set: one cache for all, and by which keys.

Parts (``--part``, all by default):

- two: iCache's Figure 14. A light and a heavy model train at once over one cache of 20 %: by the
  joint value of both jobs' scores (AIV), by the scores of either job alone, by LRU, all with
  iCache's importance sampling; beside them uniform epochs by next use, of both jobs' plans. The
  heavy model computes for longer than storage needs; the light one waits for storage.
- repeats: the same with samples that differ more in how often they come: three times for the most
  important fifth (SHADE's sampling, by its public code).
- bound: repeats, with a heavier model that waits for storage too.
- four: four jobs with different seeds over a data set five times the cache: all plans merged,
  against four jobs with a quarter of the cache each, and against one cache whose keys each job
  writes for itself.

The storage gives 60 MB/s for all together. Accelerators sleep. A job is a process, with one worker
and its prefetch; ``all_s`` is from the first batch of all to the last of the slowest, ``sum_s``
the time of all jobs together.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_process import Running
from harness import Report, own_runtime, paired_ratio, parser, show

import stoker
from stoker import recipes
from stoker.jobs import Sharing
from stoker.jobs.survey import survey
from stoker.recipes import Recipe
from stoker.sim.signals import MadeUpLosses
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

SIZE, BANDWIDTH, BATCH = 20_000, 60e6, 32
NEVER = 1e9  # a gain that no job has
LIGHT, HEAVY, BOUND = 12_000, 1_500, 4_000  # samples a second that models compute


@dataclass(frozen=True)
class Work:
    """What one job does."""

    recipe: Recipe
    cache: float
    seed: int
    samples_per_second: float
    epochs: int
    sharing: Sharing = field(default_factory=Sharing)
    alone: bool = False
    """Whether it keeps its cache to itself."""


def main() -> None:
    """Parse the arguments, run the parts, print a report for each."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.set_defaults(rounds=2)
    args = arguments.parse_args()
    for name in args.part:
        report = Report(f"Jobs: {name}", args.smoke)
        PARTS[name](report, 1 if args.smoke else args.rounds, args.smoke)
        show(args, report, part=name)


def two(report: Report, rounds: int, smoke: bool) -> None:
    """A light and a heavy model at once."""
    by_score, blind = (recipes.icache(parts=parts, warm_up=1) for parts in ("iis+hc", "iis"))
    _light_and_heavy(report, rounds, smoke, by_score, blind, HEAVY, 8)


def repeats(report: Report, rounds: int, smoke: bool) -> None:
    """A light and a heavy model at once, whose important samples come three times as often."""
    _light_and_heavy(report, rounds, smoke, *_repeating(), HEAVY, 8)


def bound(report: Report, rounds: int, smoke: bool) -> None:
    """The same, where both models wait for storage."""
    _light_and_heavy(report, rounds, smoke, *_repeating(), BOUND, 16)


def _repeating() -> tuple[Recipe, Recipe]:
    """Return SHADE with its placement, and with LRU in place of it."""
    by_score = recipes.shade(repetition=3, important=0.2)
    return by_score, replace(by_score, policy=recipes.lru().policy)


def _light_and_heavy(
    report: Report,
    rounds: int,
    smoke: bool,
    by_score: Recipe,
    blind: Recipe,
    heavy_rate: float,
    epochs: int,
) -> None:
    count, epochs = (100, 2) if smoke else (2_000, epochs)

    def pair(recipe: Recipe, light: float = 1.5, heavy: float = 1.5) -> list[Work]:
        return [
            Work(recipe, 0.2, 0, LIGHT, epochs, Sharing("light", eligible_from=light)),
            Work(recipe, 0.2, 1, heavy_rate, epochs, Sharing("heavy", eligible_from=heavy)),
        ]

    found = _compare(
        report,
        {
            "AIV of both": pair(by_score),
            "scores of the light job": pair(by_score, light=1.0, heavy=NEVER),
            "scores of the heavy job": pair(by_score, light=NEVER, heavy=1.0),
            "LRU": pair(blind),
            "uniform, next use of both": pair(recipes.belady()),
            "uniform, LRU": pair(recipes.lru()),
        },
        count,
        rounds,
    )
    for other in () if smoke else list(found)[1:4]:
        for name, what in (("all_s", "till the last has ended"), ("sum_s", "of both jobs")):
            ratio = _ratio(found, name, "AIV of both", other)
            report.target(f"time {what}, AIV / {other}", ratio, 1.0)


def four(report: Report, rounds: int, smoke: bool) -> None:
    """Four jobs with different seeds, bound by the storage."""
    count, epochs = (100, 2) if smoke else (2_000, 4)
    share = 0.2

    def jobs(name: str, **options: Any) -> list[Work]:
        cache = share / 4 if options.get("alone") else share
        return [
            Work(recipes.get(name), cache, seed, 20_000, epochs, **options) for seed in range(4)
        ]

    found = _compare(
        report,
        {
            "merged next use": jobs("belady"),
            "each its own next use": jobs("belady", sharing=Sharing(merge=False)),
            "shared MinIO": jobs("minio"),
            "shared LRU": jobs("lru"),
            "a quarter each, MinIO": jobs("minio", alone=True),
            "a quarter each, next use": jobs("belady", alone=True),
        },
        count,
        rounds,
    )
    for other in list(found)[1:]:
        ratio = _ratio(found, "all_s", "merged next use", other)
        report.target(f"time merged / {other}", ratio, 1.0)


PARTS = {"two": two, "repeats": repeats, "bound": bound, "four": four}

Found = dict[str, list[dict[str, float]]]
"""By case: the figures of each round."""


def _ratio(found: Found, name: str, case: str, other: str) -> float:
    ours, theirs = ([figures[name] for figures in found[one]] for one in (case, other))
    return paired_ratio(ours, theirs)


def _compare(
    report: Report,
    cases: dict[str, list[Work]],
    count: int,
    rounds: int,
) -> Found:
    """Run all cases in each round; add a row for each."""
    rng = np.random.default_rng(0)
    if report.smoke:
        cases = dict(list(cases.items())[:1])
    found: Found = {name: [] for name in cases}
    source = SlowSource(
        MemorySource([rng.bytes(SIZE) for _ in range(count)]), latency=0.002, bandwidth=BANDWIDTH
    )
    for number in range(rounds):
        for name in list(cases) if number % 2 else reversed(cases):
            found[name].append(_run(cases[name], source))
            seconds = found[name][-1]["all_s"]
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    for name, figures in found.items():
        report.row(
            case=name,
            **{key: float(np.median([figure[key] for figure in figures])) for key in figures[0]},
        )
    return found


def _run(works: list[Work], source: SlowSource) -> dict[str, float]:
    """Run jobs at once; return the seconds till the last ended, and what they read."""
    source.reset_reads()
    together = multiprocessing.get_context("spawn").Barrier(len(works), timeout=120)
    with own_runtime():
        running = [Running(train, (work, source, together)) for work in works]
        results = [each.result() for each in running]
    accesses = sum(result["accesses"] for result in results)
    figures = {
        "all_s": max(result["end"] for result in results) - results[0]["begin"],
        "sum_s": sum(result["end"] - result["begin"] for result in results),
        "hits": sum(result["hits"] for result in results) / accesses,
        "source_MB": float(source.reads.sum()) * SIZE / 1e6,
        "accesses": float(accesses),
    }
    if len(works) == 2:
        figures |= {
            "light_gain": results[0]["gain"],
            "heavy_gain": results[1]["gain"],
            "light_hits": results[0]["hits"] / results[0]["accesses"],
            "heavy_hits": results[1]["hits"] / results[1]["accesses"],
        }
    return figures


def train(work: Work, source: SlowSource, together: Any) -> dict[str, Any]:
    """Be one job: iterate, sleep as long as its model would compute, tell made-up losses."""
    if work.alone:
        own = Path(os.environ["STOKER_RUNTIME_DIR"]) / str(os.getpid())
        own.mkdir(mode=0o700)
        os.environ["STOKER_RUNTIME_DIR"] = str(own)
    # What both models find hard, and what each does.
    common, own_losses = MadeUpLosses(len(source), 0), MadeUpLosses(len(source), 10 + work.seed)
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(
            stoker.Loader(
                stoker.SampleDataset(source),
                BATCH,
                num_workers=1,
                collate_fn=len,
                recipe=work.recipe,
                cache=stoker.Cache(f"{work.cache:.2%}", sharing=work.sharing),
                seed=work.seed,
                epochs=work.epochs,
                persistent_workers=True,
                return_meta=True,
            )
        )
        together.wait()
        begin = time.monotonic()
        free = begin
        for epoch in range(work.epochs):
            for size, meta in loader:
                free = max(free, time.monotonic()) + size / work.samples_per_second
                time.sleep(max(0.0, free - time.monotonic()))
                both = common(meta.ids, epoch) * own_losses(meta.ids, epoch)
                loader.observe(torch.from_numpy(np.sqrt(both)), meta=meta)
        end = time.monotonic()
        stats = loader.stats
        gain = _gain()
        together.wait()  # who answers for the cache shall not go yet
    return {
        "begin": begin,
        "end": end,
        "hits": stats.hits,
        "accesses": stats.accesses,
        "gain": gain,
    }


def _gain() -> float:
    """Return what this job has told of its gain, once who answers for its cache has time."""
    for _ in range(20):
        for cache in survey():
            for job in cache.jobs:
                if job.pid == os.getpid():
                    return job.benefit
    raise RuntimeError("this job is not in the table of its cache")


if __name__ == "__main__":
    main()
