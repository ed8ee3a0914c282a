"""The tables and the plot of importance.py, made of whatever results there are."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import Report, show
from importance_cases import BY_CODE, LIVE_AT, REPLAYS, SHARES, TRAINED_AT, TRAININGS
from importance_train import TOP, Settings

Found = dict[str, Any]
GOALS = {0.1: 0.33, 0.2: 0.65}
"""Least hits of SHADE as its public code repeats, by cache share."""
ROWS = (0.1, 0.2, 0.5)
"""Cache shares that the long table has for all recipes; others where a paper has a figure."""
LATE = 6
"""Last epochs that steady hits are taken from: two of iCache's cycles of three."""


def show_all(folder: Path, samples: int, settings: Settings, args: argparse.Namespace) -> None:
    """Print every table; save the plot where matplotlib is."""
    trained, replayed = _results(folder / "train"), _results(folder / "replay")
    about = (
        f"{samples} images, {settings.epochs} epochs, {settings.model} network, "
        f"{len({found['seed'] for found in trained})} seeds"
    )
    reports = (
        _hits(replayed, about, args.smoke),
        _against(replayed, about, args.smoke),
        _live(trained, replayed, about, args.smoke),
        _accuracy(trained, about, args.smoke, 0.0),
        _accuracy(trained, about, args.smoke, 0.2),
        _precision(trained, about, args.smoke),
    )
    show(args, *(report for report in reports if report.rows))
    _plot(replayed, folder / "hits.png", about)


def _results(folder: Path) -> list[Found]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _share(epochs: list[Found], *names: str) -> float:
    """Return the share of all accesses of these epochs that ended so."""
    total = sum(epoch["accesses"] for epoch in epochs)
    return sum(epoch[name] for epoch in epochs for name in names) / total


def _late(found: Found) -> list[Found]:
    epochs: list[Found] = found["epochs"]
    return epochs[-LATE:]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _by(found: list[Found], *names: str) -> dict[Any, list[Found]]:
    groups = defaultdict(list)
    for one in found:
        groups[tuple(one[name] for name in names)].append(one)
    return groups


def _hits(replayed: list[Found], about: str, smoke: bool) -> Report:
    """Real hits by cache size."""
    report = Report(f"Hits by cache share, % of accesses ({about})", smoke)
    groups = _by(replayed, "replay", "cache")
    for name in [*REPLAYS, "shade x3", "shade x3 hits first"]:
        row = {
            f"{cache:.0%}": round(100 * _mean(_share(_late(one), "hits") for one in ones), 1)
            for cache in SHARES
            if (ones := groups.get((name, cache)))
        }
        if row:
            report.row(recipe=name, **row)
    report.remarks = [
        f"Served from a copy kept for this use, no read caused, in the last {LATE} epochs; "
        "the first epoch of a training hits nothing and is not among them.",
        "shade x3: the repetition of its public code, three times as much of as many samples as "
        "the cache holds, spread over the epoch. hits first: the same visits in the order of that "
        "code, which emits what is cached before all else. So nothing enters and pushes out a "
        "sample that is still to come, as it does when keys follow scores and repeats are spread.",
    ]
    return report


def _against(replayed: list[Found], about: str, smoke: bool) -> Report:
    """Everything the papers count, beside what they found."""
    report = Report(f"What is served without a read of its own, % ({about})", smoke)
    groups = _by(replayed, "replay", "cache")
    lru = {key[1]: ones for key, ones in groups.items() if key[0] == "lru"}
    for (name, cache), ones in sorted(groups.items(), key=lambda item: item[0][1]):
        papers = (REPLAYS[name].paper if name in REPLAYS else BY_CODE) or {}
        if cache not in (*ROWS, *papers):
            continue
        served = _mean(_share(_late(one), "hits", "substituted", "packaged") for one in ones)
        real = _mean(_share(_late(one), "hits") for one in ones)
        paper = papers.get(cache)
        report.row(
            recipe=name,
            cache=f"{cache:.0%}",
            hits=round(100 * real, 1),
            packaged=round(100 * _mean(_share(_late(one), "packaged") for one in ones), 1),
            substituted=round(100 * _mean(_share(_late(one), "substituted") for one in ones), 1),
            together=round(100 * served, 1),
            paper=None if paper is None else round(100 * paper, 1),
            top_k=round(100 * _mean(_mean(one["top_k"][-LATE:]) for one in ones), 1),
            above_minio=round(100 * (real - cache), 1),
            all_epochs=round(
                100
                * _mean(_share(one["epochs"], "hits", "substituted", "packaged") for one in ones),
                1,
            ),
            spread=round(100 * _spread([_share(_late(one), "hits") for one in ones]), 2),
            times_lru=None
            if cache not in lru
            else round(real / max(1e-9, _mean(_share(_late(o), "hits") for o in lru[cache])), 1),
        )
        if name.startswith("shade x3") and cache in BY_CODE:
            report.target(f"{name} at {cache:.0%}", real, GOALS[cache], at_least=True)
        elif paper is not None and name in ("icache", "impact"):
            report.target(
                f"{name} at {cache:.0%}, distance to its paper", abs(served - paper), 0.03
            )
    report.remarks = [
        "together: hits, packaged and substituted as one, as the papers count. top_k: a cache that "
        "holds the best scored samples when an epoch begins and then stands still. all_epochs: "
        "together, with the first epochs.",
        "LRU nearly never hits at small sizes, so that times_lru says little by itself.",
    ]
    return report


def _live(trained: list[Found], replayed: list[Found], about: str, smoke: bool) -> Report:
    """Trainings with the cache, beside the replays that stand for them."""
    report = Report(f"Live through the Loader, % of accesses ({about})", smoke)
    records = _by(replayed, "replay", "cache", "seed")
    pairs = {
        "minio": "uniform",
        "quiver": "quiver",
        "shade": "shade",
        "shade x3": "shade x3",
        "icache iis": "iis",
        "icache": "icache",
        "impact iis+hc": "impact hc",
        "impact": "impact",
        "spider importance": "spider importance",
        "spidercache": "spidercache",
        "infobatch": "infobatch",
    }
    for name, training in pairs.items():
        for one in trained:
            key = name, one["cache"], one["seed"]
            if one["training"] != training or one["flipped"] or key not in records:
                continue
            played = records[key][0]
            report.row(
                recipe=name,
                cache=f"{one['cache']:.0%}",
                seed=one["seed"],
                **{
                    f"{kind} {what}": round(100 * _share(_late(found), what), 1)
                    for what in ("hits", "packaged", "substituted")
                    for kind, found in (("live", one), ("replay", played))
                },
            )
    report.remarks = [
        "Where samples substitute for others, training diverges from the record, which was made "
        "without substitution: scores and visits differ from the replay, the rules do not.",
        f"At {LIVE_AT:.0%} the first seed only. ImPACT's record is that of {TRAINED_AT:.0%}: at "
        "other sizes its volatile samples are determined again, and more lack a fresh score.",
    ]
    return report


def _accuracy(trained: list[Found], about: str, smoke: bool, flipped: float) -> Report:
    """Accuracy beside uniform epochs, seed by seed."""
    title = f", {flipped:.0%} of labels wrong" if flipped else ""
    report = Report(f"Accuracy on held-out images, %{title} ({about})", smoke)
    here = [one for one in trained if one["flipped"] == flipped and one["cache"] == TRAINED_AT]
    groups = _by(here, "training")
    uniform = {one["seed"]: one["accuracy"] for one in groups.get(("uniform",), [])}
    for name in TRAININGS:
        ones = groups.get((name,), [])
        if not ones:
            continue
        paired = [one["accuracy"] - uniform[one["seed"]] for one in ones if one["seed"] in uniform]
        report.row(
            training=name,
            accuracy=round(100 * _mean(one["accuracy"] for one in ones), 2),
            spread=round(100 * _spread([one["accuracy"] for one in ones]), 2),
            to_uniform=round(100 * _mean(paired), 2) if paired else None,
            error=round(100 * _spread(paired) / len(paired) ** 0.5, 2) if paired else None,
            worst_class=round(100 * _mean(one["worst_class"] for one in ones), 1),
            visits=round(_mean(_visits(one) for one in ones), 3),
            ess=round(_mean(_mean(e["ess"] for e in _late(one)) for one in ones), 3),
            coverage=round(_mean(_mean(e["coverage"] for e in _late(one)) for one in ones), 3),
            seeds=len(ones),
        )
    report.remarks = [
        "to_uniform: mean over seeds of the difference to uniform epochs of the same seed, error "
        "its standard error. visits: accesses over those of full epochs. ess, coverage: effective "
        f"and distinct share of the samples in one of the last {LATE} epochs.",
        f"Those with substitutes were trained with a cache of {TRAINED_AT:.0%}.",
    ]
    return report


def _precision(trained: list[Found], about: str, smoke: bool) -> Report:
    """History against hybrid evaluation."""
    report = Report(f"The most important samples against a full evaluation, % ({about})", smoke)
    groups = _by([one for one in trained if one["cache"] == TRAINED_AT], "training", "flipped")
    for (name, flipped), ones in groups.items():
        if TRAININGS[name].is_checked:
            report.row(
                evaluation="hybrid" if name.startswith("impact") else "history",
                wrong_labels=f"{flipped:.0%}",
                **{
                    f"top {share:.0%}": round(
                        100 * _mean(_mean(p[i] for p in one["precision"][-LATE:]) for one in ones),
                        1,
                    )
                    for i, share in enumerate(TOP)
                },
            )
    report.remarks = [
        "Which part of the top by the scores that a plan was made from is the top by the losses "
        f"of all samples at that moment, in the last {LATE} epochs. Hybrid rescores a twentieth "
        "of the samples (a quarter of a cache for a fifth); both train on about as many."
    ]
    return report


def _visits(found: Found) -> float:
    epochs: list[Found] = found["epochs"]
    return sum(e["accesses"] for e in epochs) / (len(epochs) * epochs[0]["accesses"])


def _plot(replayed: list[Found], path: Path, about: str) -> None:
    """Save hits by cache size as PNG, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    groups = _by(replayed, "replay", "cache")
    for axis, names, title in (
        (axes[0], ("hits",), "hits"),
        (axes[1], ("hits", "substituted", "packaged"), "hits, packaged and substituted"),
    ):
        for name in REPLAYS:
            points = [
                (100 * cache, 100 * _mean(_share(_late(one), *names) for one in ones))
                for cache in SHARES
                if (ones := groups.get((name, cache)))
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xlabel="cache, % of the data", title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of accesses")
    axes[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(about)
    figure.savefig(path, dpi=130)
