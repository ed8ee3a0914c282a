"""What no_regret.py found, as a table and as a map."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Report, paired_interval, paired_ratio
from numpy.typing import NDArray

Line = dict[str, Any]
FIGURES = ("time, first epoch", "time, later", "CPU, first epoch", "CPU, later")
REGRET = 1.03
COMPUTE = {"none": 0.0, "balanced": 1.0, "bound": 2.0}
"""How long training computes, of the time that torch's DataLoader takes without that."""
ALONE = "torch without compute"
_FAR = ("posix-", "http-")
_WHERE = ("page-cache/2KB", "disk/2KB")


class Ratio(NamedTuple):
    """Stoker's to torch's: the median of the rounds, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratios(lines: list[Line]) -> dict[str, list[Ratio]]:
    """Return by cell the four :data:`FIGURES`, of rounds that both have run."""
    rounds: dict[str, dict[int, dict[str, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        if line["who"] != ALONE:
            rounds[line["cell"]][line["round"]][line["who"]] = line
    found = {}
    for cell, by_round in rounds.items():
        pairs = [(pair["stoker"], pair["torch"]) for pair in by_round.values() if len(pair) == 2]
        if pairs:
            ours, theirs = (
                np.array([_figures(line) for line in each]) for each in zip(*pairs, strict=True)
            )
            found[cell] = [_ratio(ours[:, i], theirs[:, i]) for i in range(len(FIGURES))]
    return found


def waiting(lines: list[Line]) -> dict[str, float]:
    """Return by cell the share of its later epochs in which training waits for torch's DataLoader.

    It computes for a known time in the rest of them.
    """
    alone = {
        line["cell"]: float(np.median(line["epoch_s"][1:]))
        for line in lines
        if line["who"] == ALONE
    }
    epochs: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["who"] == "torch":
            epochs[line["cell"]].append(float(np.mean(line["epoch_s"][1:])))
    return {
        cell: 1 - COMPUTE[cell.rpartition("/")[2]] * alone.get(cell, 0.0) / float(np.median(all_of))
        for cell, all_of in epochs.items()
    }


def _figures(line: Line) -> tuple[float, ...]:
    seconds, cpu, later = line["epoch_s"], line["epoch_cpu_s"], len(line["epoch_s"]) - 1
    return seconds[0], float(np.mean(seconds[1:])), cpu[0], (line["cpu_s"] - cpu[0]) / later


def _ratio(of: NDArray[np.float64], to: NDArray[np.float64]) -> Ratio:
    of, to = np.maximum(of, 1e-3), np.maximum(to, 1e-3)
    return Ratio(paired_ratio(of, to), *paired_interval(of, to))


def table(lines: list[Line], smoke: bool) -> Report:
    """Return a row for each cell, and what the map is to show."""
    report, found = Report("No regret: Stoker to torch's DataLoader", smoke), ratios(lines)
    for cell, figures in found.items():
        report.row(cell=cell, **{name: str(r) for name, r in zip(FIGURES, figures, strict=True)})
    if not found:
        return report
    for i, name in enumerate(FIGURES[:2]):
        over = [cell for cell, figures in found.items() if figures[i].low > REGRET]
        report.target(f"cells whose interval lies above {REGRET}, {name}", float(len(over)), 0)
    shares = waiting(lines)
    bound = [
        [r.value for r in figures]
        for cell, figures in found.items()
        if cell.startswith(_FAR) and shares[cell] >= 0.5
    ]
    if bound:
        for i, name in enumerate(FIGURES[:2]):
            median = float(np.median([values[i] for values in bound]))
            report.target(f"median of the {len(bound)} storage-bound cells, {name}", median, 0.5)
        report.remarks.append(
            "storage-bound: behind a delay or a limited bandwidth, and with torch's DataLoader "
            "training waits for half of its time or more"
        )
    small = [figures for cell, figures in found.items() if cell.startswith(_WHERE)]
    if small:
        for i, name in enumerate(FIGURES[2:], 2):
            most = max(figures[i].value for figures in small)
            report.target(f"most of the cells of 2 KB where storage is fast, {name}", most, 1.25)
    return report


def draw(
    lines: list[Line], path: Path, storages: list[str], sizes: list[str], workers: list[int]
) -> None:
    """Draw the four figures of each cell; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    found = ratios(lines)
    columns = [(size, number) for size in sizes for number in workers]
    figure = Figure(figsize=(15, 10), layout="constrained")
    for place, name in enumerate(FIGURES):
        axes = figure.add_subplot(2, 2, place + 1)
        values = np.full((len(storages), len(columns)), np.nan)
        for cell, figures in found.items():
            storage, size, number, compute = cell.split("/")
            row, column = storages.index(storage), columns.index((size, int(number)))
            ratio = figures[place]
            values[row, column] = np.log2(ratio.value)
            weight = "bold" if ratio.low > REGRET else "normal"
            letter = {"none": "n", "balanced": "e", "bound": "b"}[compute]
            text = f"{ratio.value:.2f}\n{letter}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, weight=weight)
        shown = axes.imshow(values, cmap="RdYlGn_r", vmin=-2, vmax=2, aspect="auto")
        axes.set_title(name)
        axes.set_yticks(range(len(storages)), storages)
        axes.set_xticks(range(len(columns)), [f"{size}\n{number} w" for size, number in columns])
        bar = figure.colorbar(shown, ax=axes, ticks=[-2, -1, 0, 1, 2])
        bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    figure.suptitle(
        "Stoker / torch's DataLoader; below 1 is better for Stoker; bold: certainly above 1.03; "
        "n no compute, e balanced, b compute-bound"
    )
    figure.savefig(path)
