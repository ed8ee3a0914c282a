"""How many hits an unbiased plan may have for its effective sample size, and what ours have.

Replays of ``foresight:repeat=R`` in the simulator, samples of one size unless told otherwise: for
each R the windows from those that a cache of 20 % holds to those of R epochs, and static parts of
the cache. Beside them the bounds that no plan exceeds (``stoker.sim.limits``).

    python benchmarks/frontier.py [--samples N] [--sizes lognormal:110000,0.6] [--plots FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Report, add_options, show

from stoker import recipes
from stoker.cli._options import draw_sizes
from stoker.sim import limits, replay
from stoker.sim.report import Line, chart

CACHE = 0.2
REPEATS = (2, 3, 4, 6, 8)
LONGER = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Windows, in those that the cache holds."""
STATIC = (0.0, 0.25, 0.5, 0.75)
"""Shares of the cache's bytes."""


@dataclass(frozen=True)
class Plan:
    """One setting of the recipe."""

    repeat: int
    longer: float = 1.0
    static: float | None = None

    @property
    def recipe(self) -> str:
        """Its text."""
        told = f"foresight:repeat={self.repeat}:annealed=0"
        if self.static is not None:
            return f"{told}:static={self.static:g}"
        return f"{told}:static=0:window={self.longer * CACHE * self.repeat:g}"


class Found(NamedTuple):
    """What a plan had after its first super-epoch, as shares."""

    hits: float
    byte_hits: float
    ess: float
    coverage: float


def plans() -> Iterator[Plan]:
    """Yield all settings."""
    for repeat in REPEATS:
        yield from (Plan(repeat, longer) for longer in LONGER if longer * CACHE <= 1)
        yield from (Plan(repeat, static=static) for static in STATIC)


def run(plan: Plan, sizes: np.ndarray) -> Found:
    """Replay three super-epochs, ten epochs at least."""
    epochs = plan.repeat * max(3, -(-10 // plan.repeat))
    found = replay(recipes.get(plan.recipe), len(sizes), epochs, CACHE, sizes).after(plan.repeat)
    rows = found.per_epoch
    return Found(
        found.hit_ratio,
        sum(row.hit_bytes for row in rows) / sum(row.served_bytes for row in rows),
        float(np.mean([row.ess for row in rows])),
        float(np.mean([row.coverage for row in rows])),
    )


def table(found: dict[Plan, Found], about: str) -> Report:
    """Return a row for each plan; the bound for its coverage is for samples of one size."""
    report = Report(f"Hits, effective sample size and coverage, c = 20 % ({about})")
    for plan, one in found.items():
        bound = float(limits.super_epochs(CACHE, 1 - one.coverage))
        report.row(
            R=plan.repeat,
            window="fits" if plan.longer == 1 else f"{plan.longer:g} x",
            static="-" if plan.static is None else f"{plan.static:.0%}",
            hits=round(100 * one.hits, 1),
            byte_hits=round(100 * one.byte_hits, 1),
            ess=round(one.ess, 3),
            coverage=round(one.coverage, 3),
            bound=round(100 * bound, 1),
        )
    return report


def pictures(found: dict[Plan, Found]) -> dict[str, str]:
    """Return two plots by file name: hits against the effective size, and against coverage."""
    shares = np.linspace(0.1, 1, 91)
    drawn = {}
    for name, label in (("ess", "effective sample size / N"), ("coverage", "coverage")):
        lines = [_line(found, f"R = {repeat}, windows", name, repeat, False) for repeat in REPEATS]
        lines += [_line(found, f"R = {repeat}, static", name, repeat, True) for repeat in (4, 8)]
        repeats = 1 - shares if name == "coverage" else limits.most_repeats(shares)
        bound = limits.super_epochs(CACHE, repeats)
        lines.append(Line("no plan exceeds", shares.tolist(), bound.tolist(), is_limit=True))
        title = "Hits of unbiased plans, cache 20 %"
        drawn[f"frontier-{name}.svg"] = chart(title, label, "hits / accesses", lines)
    return drawn


def _line(found: dict[Plan, Found], told: str, name: str, repeat: int, is_static: bool) -> Line:
    points = sorted(
        (getattr(one, name), one.hits)
        for plan, one in found.items()
        if plan.repeat == repeat and (plan.static is not None) == is_static
    )
    return Line(told, [x for x, _ in points], [y for _, y in points])


def main() -> None:
    """Parse the arguments, replay, print the table and draw."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--samples", type=int, default=20_000)
    arguments.add_argument("--sizes", default="equal", help="as of stoker simulate")
    arguments.add_argument("--plots", type=Path, help="draw SVG pictures into this folder")
    add_options(arguments)
    args = arguments.parse_args()
    samples = 1_000 if args.smoke else args.samples
    sizes = draw_sizes(args.sizes, samples, 0)
    found = {plan: run(plan, sizes) for plan in plans()}
    show(args, table(found, f"{samples} samples, {args.sizes} sizes"))
    if args.plots:
        args.plots.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures(found).items():
            (args.plots / name).write_text(picture)


if __name__ == "__main__":
    main()
