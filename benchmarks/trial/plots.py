"""Two plots of the trial: hits, and how much sooner than the default it is accurate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trial.contestants import CONTESTANTS
from trial.intervals import Interval, of_mean
from trial.summary import Summary
from trial.tables import MARGINS, Judged, hit_share

_COLOURS = {"baseline": "#666666", "paper": "#d55e00", "ours": "#0072b2", "control": "#009e73"}


def draw(summary: Summary, folder: Path) -> None:
    """Write ``trial-hits.svg`` and ``trial-time.svg``; ImportError without matplotlib."""
    import matplotlib

    # The same picture for the same figures.
    matplotlib.rcParams |= {"svg.hashsalt": "trial", "svg.fonttype": "none"}
    judged = Judged(summary)
    seeds = {len(judged.pairs(name)) for name in judged.names}
    told = f"paired seeds: {min(seeds)}"
    hits = {
        name: [of_mean([100 * hit_share(run) for run, _ in judged.pairs(name)])]
        for name in judged.names
        if CONTESTANTS[name].kind != "control"
    }
    _dots(
        hits,
        folder / "trial-hits.svg",
        f"Live hits over all epochs, cache 20 %: measured, {told}; dashed: simulated",
        "hits, % of accesses, with 95 % intervals",
        [""],
        {name: 100 * share for name, share in summary.get("simulated", {}).items()},
    )
    sooner = {name: [judged.sooner(name, margin) for margin in MARGINS] for name in judged.names}
    labels = ["its final accuracy", *(f"less {margin:g} points" for margin in MARGINS[1:])]
    _dots(
        sooner,
        folder / "trial-time.svg",
        f"How much sooner it is as accurate as the default: seconds simulated, {told}",
        "times sooner, with 95 % intervals; a seed that does not get there counts as 0",
        labels,
    )


def _dots(
    rows: dict[str, list[Interval]],
    path: Path,
    title: str,
    label: str,
    kinds: list[str],
    dashed: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Draw a row for each name: a dot and an interval for each kind, and the dashed value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.34 * len(rows)), layout="constrained")
    axes: Any = figure.add_subplot()
    names = list(rows)[::-1]
    for place, kind in enumerate(kinds):
        marker, shift = "osD"[place], 0.22 * ((len(kinds) - 1) / 2 - place)
        for row, name in enumerate(names):
            mean, *bounds = rows[name][place]
            colour = _COLOURS[CONTESTANTS[name].kind]
            axes.plot(bounds, [row + shift] * 2, color=colour, linewidth=1)
            axes.scatter([mean], [row + shift], c=colour, marker=marker, s=18, zorder=3)
        if kind:
            axes.scatter([], [], c="black", marker=marker, s=18, label=kind)
    for row, name in enumerate(names):
        if name in dashed:
            axes.plot([dashed[name]] * 2, [row - 0.4, row + 0.4], color="black", linestyle="--")
    for name, colour in _COLOURS.items():
        axes.scatter([], [], c=colour, marker="s", s=30, label=name)
    axes.set_yticks(range(len(names)), names)
    axes.set(title=title, xlabel=label, xlim=(0, None))
    axes.title.set_size(10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, metadata={"Date": None})
