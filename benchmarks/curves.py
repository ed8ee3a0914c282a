"""What foresight gains, in the simulator: hits, equal effective sizes, repeats, stalls, parts.

Made-up losses and N samples (``--samples``), replayed with the recipes' own samplers, scorers and
policies. Every replay is one JSON file in ``--output``, and only missing ones are made: stop and
start again as you like, or several times at once.

- hits: every recipe at caches of 5 to 80 %, with equal sizes and with sizes like ImageNet's, beside
  the most that any cache could hit.
- sizes: at 20 %, hits of recipes that draw by importance beside those of foresight with draws of
  the same effective sample size; coverage, and reads of the source for each distinct sample.
- repeats: foresight with R from 1 to 16.
- stall: time of an epoch to computing alone, for storage from 0.1 to 2 times as fast as training,
  beside the law max(1, misses / rate).
- parts: foresight without one part at a time.

Plots of the first and the fourth (``--plots DIR``) are SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, add_options, show
from tasks import Task, run_missing

from stoker import recipes
from stoker.cli._options import draw_sizes
from stoker.policy.score import Score
from stoker.recipes import Recipe
from stoker.sim import Conditions, SimResult, limits, replay
from stoker.sim.report import Line, chart
from stoker.sim.signals import with_made_up_graph

SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
SIZES = {"equal": "equal", "ImageNet's": "lognormal:110000,0.6"}
CACHE = 0.2
RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0)
"""Rates of storage to that of computing."""
COMPUTE = 10_000.0
DRAWING = ("shade", "icache:parts=iis+hc", "impact:parts=iis+hc", "spidercache:parts=importance")
"""Recipes of papers that draw by importance, without substitutes, which are no hits."""
UNIFORM_PARTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
OURS = "foresight:importance=true:repeat=4:annealed=0"
OFTEN = "foresight:repeat=8:annealed=0"
REPEATS = (1, 2, 4, 8, 16)
"""R."""
STALLED = ("lru", "minio", "foresight", "foresight:repeat=4:annealed=0", OURS, OFTEN)
PLOTTED = ("foresight:repeat=2:annealed=0", "foresight:repeat=4:annealed=0", OFTEN)
PARTS = {
    "all": OURS,
    "without repeats": "foresight:importance=true:repeat=1:annealed=0",
    "without importance": "foresight:repeat=4:annealed=0",
    "without both": "foresight:request_bytes=0",
    "with the annealed end": "foresight:importance=true:repeat=4",
    "a cache of top scores": "top scores",
}
"""Of foresight with everything, by what is taken away."""


@dataclass(frozen=True)
class Case:
    """One replay."""

    name: str
    share: float = CACHE
    sizes: str = "equal"
    rate: float | None = None
    """Of storage to computing; None: no time is kept."""

    @property
    def label(self) -> str:
        """Its name as a file."""
        told = [self.name, f"{self.share:g}", self.sizes]
        told += [] if self.rate is None else [f"{self.rate:g}"]
        return "-".join(told).replace(":", "_").replace(",", "_").replace(" ", "_")


def cases() -> Iterator[Case]:
    """Yield all replays, each once."""
    listed = [
        Case(name, share, sizes)
        for sizes in SIZES.values()
        for name in recipes.names()
        for share in SHARES
    ]
    listed += [Case(name) for name in DRAWING]
    listed += [Case(f"{OURS}:uniform_part={part}:min_ess=0") for part in UNIFORM_PARTS]
    listed += [Case(_repeating(repeat)) for repeat in REPEATS]
    listed += [Case(name, share) for name in PLOTTED for share in SHARES]
    listed += [Case(name, rate=rate) for name in STALLED for rate in RATES]
    listed += [Case(name) for name in PARTS.values()]
    yield from dict.fromkeys(listed)


def _repeating(repeat: int) -> str:
    return f"foresight:repeat={repeat}:annealed=0"


def tasks(folder: Path, samples: int, epochs: int) -> list[Task]:
    """Return one for each case."""

    def task(case: Case) -> Task:
        return Task(folder / f"{case.label}.json", (), lambda: run(case, samples, epochs))

    return [task(case) for case in cases()]


def run(case: Case, samples: int, epochs: int) -> dict[str, Any]:
    """Replay a case; return what its second half had."""
    sizes = draw_sizes(case.sizes, samples, 0)
    conditions = None
    if case.rate is not None:
        # The rate counts requests; latency is hidden by prefetch.
        conditions = Conditions(
            compute_rate=COMPUTE, iops=case.rate * COMPUTE, latency=0.002, workers=4
        )
    found = replay(
        recipe_of(case.name), samples, epochs, case.share, sizes, conditions=conditions
    ).after(epochs // 2)
    return measured(found, sizes, case.share)


def recipe_of(name: str) -> Recipe:
    """Return the recipe of a case, with made-up neighbours where it follows them."""
    if name == "top scores":
        return replace(recipes.get(OURS), policy=Score())
    return with_made_up_graph(recipes.get(name))


def measured(found: SimResult, sizes: np.ndarray[Any, Any], share: float) -> dict[str, Any]:
    """Return the figures of a replay."""
    accesses = sum(epoch.accesses for epoch in found.per_epoch)
    distinct = sum(epoch.coverage for epoch in found.per_epoch) * len(sizes)
    held = limits.smallest_first(sizes, share * float(sizes.sum()))
    crossing = min(1.0, held * len(sizes) * len(found.per_epoch) / accesses)
    reads = sum(epoch.fetched + epoch.package_reads for epoch in found.per_epoch)
    return {
        "hits": found.hit_ratio,
        "byte_hits": found.byte_hit_ratio,
        "substituted": found.substituted_ratio,
        "packaged": found.packaged_ratio,
        "most": float(limits.super_epochs(crossing, 1 - distinct / accesses)),
        "ess": found.ess,
        "coverage": found.coverage,
        "visits": accesses / len(found.per_epoch) / len(sizes),
        "reads_per_distinct": reads / distinct,
        "to_compute": found.seconds / (accesses / COMPUTE),
    }


class Tables:
    """What the replays found, as reports."""

    def __init__(self, folder: Path, about: str, smoke: bool) -> None:
        self._folder, self._about, self._smoke = folder, about, smoke

    def __call__(self) -> list[Report]:
        """Return all of them."""
        return [
            *(self.hits(told, sizes) for told, sizes in SIZES.items()),
            self.sizes(),
            self.repeats(),
            self.stall(),
            self.parts(),
        ]

    def of(self, case: Case) -> dict[str, float]:
        """Return what a case measured."""
        found: dict[str, float] = json.loads((self._folder / f"{case.label}.json").read_text())
        return found

    def hits(self, told: str, sizes: str) -> Report:
        """Hits against the cache, by number and bytes."""
        report = Report(f"Hits by cache share, {told} sizes, % ({self._about})", self._smoke)
        for name in recipes.names():
            found = [self.of(Case(name, share, sizes)) for share in SHARES]
            cells = {
                f"{share:.0%}": _percent(one["hits"])
                for share, one in zip(SHARES, found, strict=True)
            }
            at = found[SHARES.index(CACHE)]
            report.row(
                recipe=name,
                **cells,
                bytes_at_20=_percent(at["byte_hits"]),
                most_at_20=_percent(at["most"]),
                with_others_at_20=_percent(at["hits"] + at["substituted"] + at["packaged"]),
                ess=round(at["ess"], 2),
                coverage=round(at["coverage"], 2),
            )
        report.remarks = [
            "most_at_20: what no cache of 20 % of the bytes exceeds with these visits. "
            "with_others_at_20: with what was substituted or came in a package.",
        ]
        return report

    def sizes(self) -> Report:
        """Hits at equal effective sample sizes."""
        report = Report(f"Hits at equal effective sample size, c = 20 % ({self._about})")
        ours = [self.of(Case(f"{OURS}:uniform_part={part}:min_ess=0")) for part in UNIFORM_PARTS]
        sizes = [one["ess"] for one in ours]
        for name in DRAWING:
            theirs = self.of(Case(name))

            def same(figure: str, ess: float = theirs["ess"]) -> float:
                return float(np.interp(ess, sizes, [one[figure] for one in ours]))

            is_within = min(sizes) <= theirs["ess"] <= max(sizes)
            report.row(
                recipe=name,
                ess=round(theirs["ess"], 2),
                hits=_percent(theirs["hits"]),
                foresight_hits=_percent(same("hits")) if is_within else "beyond its range",
                coverage=round(theirs["coverage"], 2),
                foresight_coverage=round(same("coverage"), 2),
                reads_per_distinct=round(theirs["reads_per_distinct"], 2),
                foresight_reads=round(same("reads_per_distinct"), 2),
            )
        report.remarks = [
            f"foresight: importance, repeat 4, without a bound on the effective size; its uniform "
            f"part from {UNIFORM_PARTS[0]:g} to 1 gives {min(sizes):.2f} to {max(sizes):.2f}, and "
            "between them it is interpolated.",
        ]
        return report

    def repeats(self) -> Report:
        """Hits against R."""
        report = Report(f"Samples visited R times in R epochs, c = 20 % ({self._about})")
        for repeat in REPEATS:
            name = _repeating(repeat)
            found = self.of(Case(name))
            report.row(
                R=repeat,
                hits=_percent(found["hits"]),
                predicted=_percent(recipes.get(name).predicted_hit_ratio(CACHE) or 0.0),
                ess=round(found["ess"], 2),
                coverage=round(found["coverage"], 2),
                reads_per_distinct=round(found["reads_per_distinct"], 2),
            )
        return report

    def stall(self) -> Report:
        """Time of an epoch to computing alone, and by the law."""
        report = Report(f"Time of an epoch to computing alone, c = 20 % ({self._about})")
        for rate in RATES:
            cells: dict[str, Any] = {}
            for name in STALLED:
                found = self.of(Case(name, rate=rate))
                law = max(1.0, (1 - found["hits"]) / rate)
                cells |= {name: round(found["to_compute"], 2), f"law {len(cells) // 2}": law}
            report.row(storage=f"{rate:g}", **cells)
        report.remarks = [
            "storage: its rate of requests to that of computing. law: max(1, misses / rate) for "
            "the recipe to the left.",
        ]
        return report

    def parts(self) -> Report:
        """Foresight, a part at a time."""
        report = Report(f"foresight without one part, c = 20 % ({self._about})")
        for told, name in PARTS.items():
            found = self.of(Case(name))
            report.row(
                foresight=told,
                hits=_percent(found["hits"]),
                most=_percent(found["most"]),
                ess=round(found["ess"], 2),
                coverage=round(found["coverage"], 2),
            )
        return report

    def plots(self, folder: Path) -> None:
        """Draw hits against the cache, and utilisation against the rate of storage."""
        folder.mkdir(parents=True, exist_ok=True)
        names = ("lru", "minio", "shade", "icache", "impact", "spidercache", "foresight", *PLOTTED)
        lines = [
            Line(_told(name), SHARES, [self.of(Case(name, share))["hits"] for share in SHARES])
            for name in names
        ]
        (folder / "hits.svg").write_text(
            chart("Real hits by cache share", "cache / data", "hits / accesses", lines)
        )
        busy = [
            Line(
                _told(name),
                RATES,
                [1 / self.of(Case(name, rate=rate))["to_compute"] for rate in RATES],
            )
            for name in STALLED
        ]
        (folder / "utilisation.svg").write_text(
            chart("Accelerator busy", "storage rate / compute rate", "busy", busy)
        )


def _told(name: str) -> str:
    return name.removesuffix(":annealed=0").replace(":", ", ").replace("=", " ")


def _percent(share: float) -> float:
    return round(100 * share, 1)


def main() -> None:
    """Parse the arguments, replay what is missing, print the tables."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--samples", type=int, default=20_000)
    arguments.add_argument("--epochs", type=int, default=16)
    arguments.add_argument("--minutes", type=float, default=1e9, help="start nothing new after")
    arguments.add_argument("--output", type=Path, default=Path("curves-output"))
    arguments.add_argument("--plots", type=Path, help="draw SVG pictures into this folder")
    add_options(arguments)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        if args.smoke:
            args.samples, args.epochs, args.output = 400, 4, Path(own)
        folder = args.output / f"{args.samples}x{args.epochs}"
        run_missing(tasks(folder, args.samples, args.epochs), args.minutes)
        if any(not task.path.exists() for task in tasks(folder, args.samples, args.epochs)):
            print("no tables yet: replays are missing", file=sys.stderr)
            return
        tables = Tables(folder, f"{args.samples} samples, {args.epochs} epochs", args.smoke)
        show(args, *tables())
        if args.plots:
            tables.plots(args.plots)


if __name__ == "__main__":
    main()
