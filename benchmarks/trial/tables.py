"""The tables of the trial, made of the summary of its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import Report

from trial.contestants import BUDGET, CACHE, CONTESTANTS, DEFAULT, RATES
from trial.intervals import Interval, of_mean, of_ratio
from trial.papers import PAPERS
from trial.summary import READS, Run, Summary

MARGINS = (0.0, 0.5, 1.0)
"""Points below the final accuracy of the default of the same seed."""
CHOSEN = "foresight, repeat 8"
"""Ours that the goals are for, chosen before the trial; another one where a summary names it."""


class Judged:
    """The judged runs by contestant and seed, and the figures that tables and plots show."""

    def __init__(self, summary: Summary) -> None:
        self.about = summary["about"]
        self.chosen: str = self.about.get("chosen", CHOSEN)
        self.clock: str = self.about.get("clock", "simulated")
        """Whether seconds are simulated or measured."""
        self.simulated = summary.get("simulated", {})
        self.runs: dict[str, dict[int, Run]] = defaultdict(dict)
        for run in summary["judged"]:
            self.runs[run["name"]][run["seed"]] = run
        self.names = [name for name in CONTESTANTS if self.pairs(name)]

    def pairs(self, name: str) -> list[tuple[Run, Run]]:
        """Return each run of a contestant with the default's of the same seed."""
        default = self.runs.get(DEFAULT, {})
        own = self.runs.get(name, {})
        return [(own[seed], default[seed]) for seed in sorted(own.keys() & default.keys())]

    def mean(self, name: str, of: Callable[[Run], float]) -> float:
        """Return the mean over seeds."""
        return float(np.mean([of(run) for run, _ in self.pairs(name)]))

    def difference(self, name: str, of: Callable[[Run], float]) -> Interval:
        """Return by how much a contestant differs from the default, in points."""
        return of_mean([100 * (of(run) - of(default)) for run, default in self.pairs(name)])

    def faster(self, name: str) -> Interval:
        """Return the default's seconds an epoch to the contestant's."""
        return of_ratio([_an_epoch(other) / _an_epoch(run) for run, other in self.pairs(name)])

    def sooner(self, name: str, margin: float) -> Interval:
        """Return the default's time to the target to the contestant's; never there counts as 0."""
        return of_ratio(self.speeds(name, margin))

    def speeds(self, name: str, margin: float) -> list[float]:
        """Return the same of each seed."""
        found = []
        for run, default in self.pairs(name):
            target = default["accuracy"][-1] - margin / 100
            found.append(time_to(default, target) / time_to(run, target))
        return found


def final(run: Run) -> float:
    """Return the held-out accuracy at the end."""
    return float(run["accuracy"][-1])


def worst(run: Run) -> float:
    """Return that of the worst class."""
    return float(run["worst_class"])


def hit_share(run: Run) -> float:
    """Return the share of accesses, the first epoch's included, that hit."""
    return float(run["totals"]["hits"] / run["totals"]["accesses"])


def served(run: Run) -> float:
    """Return hits as the papers of substituting recipes count: with all that was not read alone."""
    totals = run["totals"]
    return float((totals["hits"] + totals["substituted"] + totals["packaged"]) / totals["accesses"])


def reads(run: Run) -> float:
    """Return the requests to the storage."""
    return float(sum(run["totals"][name] for name in READS))


def time_to(run: Run, target: float) -> float:
    """Return the seconds up to the first epoch that ends with this accuracy, or infinity."""
    at = np.flatnonzero(np.array(run["accuracy"]) >= target)
    return float(np.cumsum(run["seconds"])[at[0]]) if len(at) else np.inf


def _an_epoch(run: Run) -> float:
    return float(sum(run["seconds"]) / len(run["seconds"]))


def tables(summary: Summary, smoke: bool = False) -> list[Report]:
    """Return all tables; none if the default has not been judged."""
    judged = Judged(summary)
    if not judged.names:
        return []
    about = judged.about
    origin = f"`{about['command']}` on {about['machine']}"
    found = [_accuracy(judged, smoke), _time(judged, smoke), _hits(judged, smoke)]
    if summary["validated"]:
        found.append(_validation(summary))
    if summary["tuned"]:
        found += [_tuning(summary), _infobatch(summary)]
    for report in found:
        report.origin = origin
    return found


def _accuracy(judged: Judged, smoke: bool) -> Report:
    report = Report("Accuracy: measured", smoke)
    for name in judged.names:
        difference, low = judged.difference(name, final), judged.difference(name, worst)
        pairs = judged.pairs(name)
        report.row(
            contestant=name,
            setting=_setting(name, pairs[0][0]["setting"]),
            seeds=len(pairs),
            epochs=round(judged.mean(name, lambda run: len(run["accuracy"])), 1),
            accuracy=round(100 * judged.mean(name, final), 2),
            to_default=str(difference),
            worst_class=round(100 * judged.mean(name, worst), 1),
            worst_to_default=low.told(1),
        )
    report.remarks = [
        "accuracy: % of held-out images, at the end; worst_class: of the class with the lowest. "
        "to_default, worst_to_default: mean of the differences to the default of the same seed, in "
        "points, with Student's 95 % interval.",
    ]
    if judged.clock == "simulated":
        report.remarks.append(
            "minio and foresight visit the same samples in the same order as the default, which is "
            "checked; only their caches were run."
        )
    if (chosen := judged.chosen) in judged.names and len(judged.pairs(chosen)) > 1:
        report.target(
            f"{chosen}: accuracy to the default, lower end",
            judged.difference(chosen, final).low,
            -0.3,
            "points",
            at_least=True,
        )
    return report


def _time(judged: Judged, smoke: bool) -> Report:
    report = Report(f"Time to accuracy: accuracy measured, seconds {judged.clock}", smoke)
    for name in judged.names:
        cells: dict[str, Any] = {}
        for margin in MARGINS:
            told = "to_default's" if not margin else f"less_{margin:g}"
            speeds = judged.speeds(name, margin)
            there = sum(speed > 0 for speed in speeds)
            cells[told] = f"{judged.sooner(name, margin)}, {there} of {len(speeds)}"
        report.row(
            contestant=name,
            seconds=round(judged.mean(name, lambda run: sum(run["seconds"])), 1),
            **cells,
        )
    report.remarks = [
        "How many times sooner than the default of the same seed its final accuracy is reached, "
        "or that less half a point or a point: mean over seeds with its bootstrap 95 % interval, "
        "and how many seeds get there; one that does not counts as 0. Looked at after each epoch. "
        "With less than six seeds such an interval is too narrow.",
    ]
    if (chosen := judged.chosen) in judged.names:
        ours = judged.sooner(chosen, 0.0)
        others = {
            name: judged.sooner(name, 0.0).mean
            for name in judged.names
            if CONTESTANTS[name].kind != "ours"
        }
        best = max(others, key=lambda name: others[name])
        report.target(f"{chosen}: times sooner than the default", ours.mean, 2, at_least=True)
        ratio = ours.mean / others[best]
        report.target(f"{chosen}: to the best other ({best})", ratio, 1.3, at_least=True)
    return report


def _hits(judged: Judged, smoke: bool) -> Report:
    report = Report(
        f"Hits and reads, cache {CACHE:.0%}: measured; seconds an epoch: {judged.clock}", smoke
    )
    for name in judged.names:
        hits = of_mean([100 * hit_share(run) for run, _ in judged.pairs(name)])
        an_epoch = partial(_an_epoch_of, judged, name)
        share = partial(_share_of, judged, name)
        report.row(
            contestant=name,
            hits=hits.told(1),
            **_simulated(judged, name),
            substituted=share("substituted"),
            packaged=share("packaged"),
            visits=round(an_epoch(_visits) / judged.about["samples"], 2),
            reads_an_epoch=round(an_epoch(reads)),
            MB_an_epoch=round(an_epoch(_bytes) / 1e6, 2),
            s_an_epoch=round(judged.mean(name, _an_epoch), 2),
            faster=judged.faster(name).told(2),
            stall=f"{judged.mean(name, _stalled):.0%}",
            ess=round(judged.mean(name, lambda run: run["ess"]), 2),
            coverage=round(judged.mean(name, lambda run: run["coverage"]), 2),
        )
    report.remarks = [
        "hits, substituted, packaged: % of the accesses of all epochs, the first one and the full "
        "ones at the end included. simulated: hits in a replay of the same recipe and sizes, with "
        "made-up losses. visits: to a full epoch. faster: than the default, an epoch. "
        "ess, coverage: effective sample size and distinct samples of an epoch, to N.",
    ]
    if judged.clock == "simulated":
        report.remarks.append(
            "The clock asks for what was really fetched, and for nothing besides, also where a "
            "real prefetcher could not know what would be substituted: that favours those that "
            "substitute.",
        )
    if (chosen := judged.chosen) in judged.names:
        report.target(
            f"{chosen}: hits over all epochs", judged.mean(chosen, hit_share), 0.7, at_least=True
        )
        own = judged.mean(chosen, _an_epoch)
        papers = [name for name in judged.names if CONTESTANTS[name].kind == "paper"]
        best = min(papers, key=lambda name: judged.mean(name, _an_epoch), default=None)
        if best is not None:
            ratio = judged.mean(best, _an_epoch) / own
            report.target(f"{chosen}: faster an epoch than {best}", ratio, 1.0, at_least=True)
    return report


def _simulated(judged: Judged, name: str) -> dict[str, float | None]:
    if not judged.simulated:
        return {}
    share = judged.simulated.get(name)
    return {"simulated": None if share is None else round(100 * share, 1)}


def _share_of(judged: Judged, name: str, key: str) -> float:
    total = judged.mean(name, lambda run: run["totals"][key] / run["totals"]["accesses"])
    return round(100 * total, 1)


def _an_epoch_of(judged: Judged, name: str, of: Callable[[Run], float]) -> float:
    return judged.mean(name, lambda run: of(run) / len(run["seconds"]))


def _visits(run: Run) -> float:
    return float(run["totals"]["accesses"])


def _bytes(run: Run) -> float:
    return float(run["totals"]["bytes_from_source"])


def _stalled(run: Run) -> float:
    return float(run["totals"]["stall"] / run["totals"]["seconds"])


def _validation(summary: Summary) -> Report:
    report = Report("The virtual clock (simulated) beside real time (measured)")
    for run in sorted(summary["validated"], key=lambda run: -run["virtual_s"]):
        report.row(
            recipe=run["recipe"],
            real_s=run["real_s"],
            virtual_s=run["virtual_s"],
            ratio=round(run["virtual_s"] / run["real_s"], 3),
            real_hits=f"{run['real_hits']:.1%}",
            virtual_hits=f"{run['virtual_hits']:.1%}",
        )
    report.remarks = [
        "Seconds an epoch, from the second on. real: storage with the limits in real time, two "
        "workers, prefetch as by default, a step as a sleep. virtual: one process without "
        "prefetch, unlimited storage, and the clock. 2,000 samples, 6 epochs, one run, made-up "
        "losses. Other work shares the processors, which lengthens real time where reads do not.",
    ]
    return report


def _tuning(summary: Summary) -> Report:
    report = Report("Tuning: measured")
    by_name: dict[str, list[Run]] = defaultdict(list)
    for run in summary["tuned"]:
        by_name[run["name"]].append(run)
    for name in [name for name in CONTESTANTS if name in by_name and CONTESTANTS[name].grid]:
        tried = [
            f"{_setting(name, run['setting'])}: {100 * run['accuracy']:.1f}"
            for run in by_name[name]
        ]
        report.row(contestant=name, settings_and_accuracy="; ".join(tried))
    report.remarks = [
        f"{BUDGET} settings each, on one seed and on held-out images that judging does not use; "
        "the most accurate one is judged.",
    ]
    return report


def _infobatch(summary: Summary) -> Report:
    """Return what InfoBatch's accuracy loses, a cause at a time, of the runs of tuning."""
    report = Report("InfoBatch, a half of the easy samples left out: measured, in tuning")
    told = {
        DEFAULT: "uniform epochs",
        "random pruning as infobatch": "as few random samples in each epoch",
        "infobatch, weights of mean 1": "infobatch, weights scaled to a mean of 1",
        "infobatch": "infobatch",
        "infobatch, as many visits": "infobatch, as many visits as uniform epochs",
    }
    for name, row in told.items():
        found = {
            run["setting"][0]: 100 * run["accuracy"]
            for run in summary["tuned"]
            if run["name"] == name and run["setting"][1] in (None, 0.5)
        }
        cells = {f"rate {rate:g}": round(found[rate], 1) for rate in RATES if rate in found}
        if cells:
            report.row(training=row, **cells)
    report.remarks = ["Accuracy, % of the held-out images of tuning; one seed."]
    return report


def _setting(name: str, setting: list[Any]) -> str:
    rate, value = setting
    if CONTESTANTS[name].like is not None:
        return f"as {DEFAULT}"
    told = f"rate {rate:g}"
    return told if value is None else f"{told}, {CONTESTANTS[name].parameter} {value:g}"


def beside_papers(judged: Judged) -> dict[str, list[dict[str, str]]]:
    """Return rows for each paper: what it found, what came out here, and why they differ."""
    return {
        paper: [
            {
                "figure": figure.told,
                "theirs": figure.theirs,
                "ours": _figure(judged, figure.kind, figure.of, figure.to or DEFAULT),
                "kind": f"[trial](trial.md), {_KINDS.get(figure.kind, 'measured')}",
                "verdict": figure.verdict,
            }
            for figure in figures
            if {figure.of, figure.to or DEFAULT} <= set(judged.names)
        ]
        for paper, figures in PAPERS.items()
    }


_KINDS = {"seconds": "seconds simulated"}


def _figure(judged: Judged, kind: str, of: str, to: str) -> str:
    if kind == "accuracy":
        return f"{judged.difference(of, final)} points"
    if kind == "hits":
        return f"{100 * judged.mean(of, hit_share):.1f} %"
    if kind == "served":
        return f"{100 * judged.mean(of, served):.1f} %"
    if kind == "hits to":
        ratio = judged.mean(of, served) / judged.mean(to, served)
        return f"{ratio:.1f} times"
    if kind == "visits":
        share = judged.mean(of, lambda run: run["totals"]["accesses"] / len(run["seconds"]))
        return f"{share / judged.about['samples']:.2f} of all"
    other = judged.mean(to, lambda run: sum(run["seconds"]))
    own = judged.mean(of, lambda run: sum(run["seconds"]))
    return f"{other / own:.2f} times"
