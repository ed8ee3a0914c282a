"""The tables of importance_time.py, made of whatever results there are."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import Report, show
from importance_time_cases import ABLATIONS, CACHE, DEFAULT, PAPERS, PUBLISHED, TIMED

Found = dict[str, Any]
READS = ("fetched", "rescored", "rebuild_reads")
"""Counters of single samples that are read from the storage."""
LATE = 6
"""Last epochs that steady ones are taken from: two of iCache's cycles of three."""


def show_all(folder: Path, args: argparse.Namespace) -> None:
    """Print every table."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_name: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        by_name[one["training"]].append(one)
    if DEFAULT not in by_name:
        print(f"nothing to show: {DEFAULT!r} has not run")
        return
    about = (
        f"{args.samples} images, {args.epochs} epochs, {args.iops:g} opens and reads a second, "
        f"cache {CACHE:.0%}, {len(by_name[DEFAULT])} seeds"
    )
    reports = [_by_epoch(by_name, about, args), _to_accuracy(by_name, about, args)]
    reports += [
        _ablation(paper, names, by_name, about, args.smoke)
        for paper, names in ABLATIONS.items()
        if set(names) <= by_name.keys() or not args.foresight
    ]
    show(args, *reports)


def _late(one: Found) -> list[Found]:
    epochs: list[Found] = one["epochs"]
    return epochs[-LATE:]


def _total(epochs: Iterable[Found], *names: str) -> float:
    return float(sum(epoch[name] for epoch in epochs for name in names))


def _mean(ones: list[Found], of: Callable[[Found], float]) -> float:
    return statistics.fmean(of(one) for one in ones)


def _limit(epochs: list[Found], by_name: dict[str, list[Found]], iops: float) -> float:
    """Return the least seconds of these epochs: those of their reads, or of computing."""
    computed = _mean(by_name["oracle"], _seconds_a_visit) if "oracle" in by_name else 0.0
    # A read is one open and one read of the storage.
    reading = (2 * _total([epoch], *READS) / iops for epoch in epochs)
    computing = (computed * _total([epoch], "accesses") for epoch in epochs)
    return sum(map(max, reading, computing))


def _served(one: Found) -> float:
    """Return the share of accesses that needed no read of the source of their own."""
    epochs = _late(one)
    return _total(epochs, "hits", "substituted", "packaged") / _total(epochs, "accesses")


def _ratios(
    ones: list[Found], others: list[Found], of: Callable[[Found], float | None]
) -> list[float]:
    """Return ``of(other) / of(one)`` for each seed of both where both have it."""
    by_seed = {other["seed"]: of(other) for other in others}
    pairs = [(by_seed.get(one["seed"]), of(one)) for one in ones]
    return [other / own for other, own in pairs if other is not None and own is not None]


def _seconds_late(one: Found) -> float:
    return _total(_late(one), "seconds")


def _seconds_a_visit(one: Found) -> float:
    return _seconds_late(one) / _total(_late(one), "accesses")


def _seconds(one: Found) -> float:
    return _total(one["epochs"], "seconds")


def _by_epoch(by_name: dict[str, list[Found]], about: str, args: argparse.Namespace) -> Report:
    """Seconds an epoch, what they were spent on, and where samples came from."""
    report = Report(f"Time an epoch ({about})", args.smoke)
    for name in [name for name in TIMED if name in by_name]:
        ones = by_name[name]
        speeds = _ratios(ones, by_name[DEFAULT], _seconds_late)
        late = [epoch for one in ones for epoch in _late(one)]
        seconds, accesses = _total(late, "seconds"), _total(late, "accesses")
        reads = _total(late, *READS) / len(late)
        limit = _limit(late, by_name, args.iops) / len(late)
        report.row(
            recipe=name,
            s_an_epoch=round(seconds / len(late), 2),
            speed=round(statistics.median(speeds), 2) if speeds else None,
            spread=f"{min(speeds):.2f}-{max(speeds):.2f}" if speeds else None,
            stall=f"{_total(late, 'stall_seconds') / seconds:.0%}",
            visits=round(accesses / len(late) / ones[0]["epochs"][0]["accesses"], 2),
            hits=f"{_total(late, 'hits') / accesses:.1%}",
            packaged=f"{_total(late, 'packaged') / accesses:.1%}",
            substituted=f"{_total(late, 'substituted') / accesses:.1%}",
            reads=round(reads),
            limit_s=round(limit, 2),
            to_limit=round(seconds / len(late) / limit, 2),
            package_reads=round(_total(late, "package_reads") / len(late)),
            scoring=f"{_total(late, 'scoring_seconds') / seconds:.1%}",
            rescoring=f"{_total(late, 'rescoring_seconds') / seconds:.1%}",
        )
    report.remarks = [
        f"Means over the last {LATE} epochs of each seed. speed: default's time over its own, "
        "median and range over seeds. visits: accesses relative to a full epoch. reads: single "
        "samples read in an epoch, including those for packages and, at most, for rescoring. "
        "limit_s: reads at the storage's rate, or the oracle's time for as many visits, whichever "
        "is more. scoring, rescoring: share of the time in observe(), and between epochs.",
        "The oracle has everything cached before it begins: its time is that of computing.",
        "Packages lie in a local directory, beside the storage that the limit is for. On it, each "
        "of their reads would be one open and one read.",
        "The papers: "
        + "; ".join(f"{name} {text}" for name, text in PUBLISHED.items())
        + " (hours of training on GPUs; SHADE's are of hits).",
    ]
    return report


def _to_accuracy(by_name: dict[str, list[Found]], about: str, args: argparse.Namespace) -> Report:
    """Seconds until an epoch ended with the accuracy of uniform epochs, less a margin."""
    uniform = [one["epochs"][-1]["accuracy"] for one in by_name[DEFAULT]]
    goal = statistics.fmean(uniform) - args.margin / 100
    report = Report(f"Time to {goal:.1%} held-out accuracy ({about})", args.smoke)

    def seconds_to_goal(one: Found) -> float | None:
        for count, epoch in enumerate(one["epochs"], 1):
            if epoch["accuracy"] >= goal:
                return _total(one["epochs"][:count], "seconds")
        return None

    speeds: dict[str, float] = {}
    for name in [name for name in TIMED if name in by_name]:
        ones = by_name[name]
        reached = [s for one in ones if (s := seconds_to_goal(one)) is not None]
        ratios = _ratios(ones, by_name[DEFAULT], seconds_to_goal)
        last = [100 * one["epochs"][-1]["accuracy"] for one in ones]
        if len(reached) == len(ones) and ratios:
            speeds[name] = statistics.median(ratios)
        report.row(
            recipe=name,
            seeds_that_reach=f"{len(reached)} of {len(ones)}",
            seconds=round(statistics.fmean(reached), 1) if reached else "never reached",
            speed=round(statistics.median(ratios), 2) if ratios else None,
            all_epochs_s=round(_mean(ones, _seconds), 1),
            accuracy=round(statistics.fmean(last), 1),
            spread=round(statistics.stdev(last), 1) if len(last) > 1 else None,
        )
    report.remarks = [
        f"The accuracy that uniform epochs (default) end with, less {args.margin:g} points; "
        f"looked at after each epoch on {args.test_samples} images, which is not timed. "
        "seconds: of the seeds that reach it. The learning rate falls over all epochs, so a "
        "recipe that reaches it needs nearly all of them.",
    ]
    if args.foresight:
        best = _judge(report, speeds)
        for one in by_name[best] if best else ():
            ratio = _seconds(one) / _limit(one["epochs"], by_name, args.iops)
            report.target(f"{best}, seed {one['seed']}, all epochs to their limit", ratio, 1.15)
    return report


def _judge(report: Report, speeds: dict[str, float]) -> str | None:
    """Compare foresight's best setting with the best of others, where all seeds reach it.

    Returns that setting, if there is one.
    """
    ours = {name: speed for name, speed in speeds.items() if name.startswith("foresight")}
    theirs = {name: speed for name, speed in speeds.items() if name in PAPERS}
    if not ours:
        report.remarks.append("no setting of foresight reaches the accuracy with all seeds")
        return None
    best = max(ours, key=ours.__getitem__)
    report.target(f"{best}, speed to default", ours[best], 2.0, at_least=True)
    others = [speed for name, speed in speeds.items() if name not in ours and name != "oracle"]
    ratio = ours[best] / max(others)
    report.target(f"{best}, speed to the best of all others", ratio, 1.0, at_least=True)
    if theirs:
        first = max(theirs, key=theirs.__getitem__)
        ratio = ours[best] / theirs[first]
        report.target(f"{best}, speed to {first}", ratio, 1.3, at_least=True)
    else:
        report.remarks.append("no recipe of the papers reaches the accuracy with all seeds")
    return best


def _ablation(
    paper: str, names: tuple[str, ...], by_name: dict[str, list[Found]], about: str, smoke: bool
) -> Report:
    """One paper's parts, added one by one."""
    report = Report(f"{paper}, part by part ({about})", smoke)
    first = by_name.get(names[0], [])
    for name in [name for name in names if name in by_name]:
        ones = by_name[name]
        late, whole = _ratios(ones, first, _seconds_late), _ratios(ones, first, _seconds)
        report.row(
            recipe=name,
            s_an_epoch=round(_mean(ones, lambda one: _seconds_late(one) / len(_late(one))), 2),
            **{f"speed to {names[0]}": round(statistics.median(late), 2) if late else None},
            with_warm_up=round(statistics.median(whole), 2) if whole else None,
            served_without_a_read=f"{_mean(ones, _served):.1%}",
            accuracy=round(100 * _mean(ones, lambda one: one["epochs"][-1]["accuracy"]), 1),
            paper=PUBLISHED.get(name),
        )
    report.remarks = [
        f"speed: over the last {LATE} epochs, median over seeds; with_warm_up: over all epochs."
    ]
    return report
