"""The demo's result: one table, how to read it, one plot, JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from stoker.cli._demo_data import Settings
from stoker.cli._demo_training import EpochLimit, Run
from stoker.cli._options import DATALOADER
from stoker.types import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    "recipe",
    "accu-\nracy",
    "s per\nepoch",
    "stall\ns",
    "hits",
    "pre-\ndicted",
    "sub-\nsti-\ntuted",
    "pack-\naged",
    "fetch-\ned",
    "from\nsource",
    "times\nlimit",
)
_READING = (
    "dataloader: torch's own, with as many workers, one read per sample and no cache; other rows "
    "are recipes of Stoker's Loader. Means over the epochs after the first, which fills the cache. "
    "stall: seconds that training waited for data. hits: share of accesses served from the cache "
    "without a read of the source; predicted: what theory gives, where it has a closed form; "
    "substituted: another sample was served; packaged: it came with many others in one read. times "
    "limit: time of an epoch over the least possible with this storage and this cache when "
    "each sample is visited once per epoch, which some recipes do not do. Warm-ups of recipes are "
    "shortened to one or two epochs."
)


@dataclass(frozen=True)
class Outcome:
    """Everything that one demo found."""

    title: str
    """The data, the cache and the storage in one line."""
    settings: Settings
    limit: EpochLimit
    runs: list[Run]

    def to_json(self) -> dict[str, Any]:
        """Return it as primitives: seconds, bytes, shares of one."""
        return {
            "title": self.title,
            "settings": asdict(self.settings),
            "limit": asdict(self.limit) | {"seconds": self.limit.seconds},
            "runs": [
                asdict(run)
                | {
                    "seconds_per_epoch": run.seconds,
                    "stall_seconds_per_epoch": run.mean("stall_seconds"),
                    "hit_ratio": run.hit_ratio,
                    "byte_hit_ratio": run.byte_hit_ratio,
                    "against_limit": run.seconds / self.limit.seconds,
                }
                for run in self.runs
            ],
        }


def show(outcome: Outcome, console: Console) -> None:
    """Print the table and how to read it."""
    # Eleven columns have to fit into 80 characters.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for run in outcome.runs:
        table.add_row(*_cells(run, outcome.limit))
    console.print(f"\n[bold]{outcome.title}[/]")
    console.print(table)
    console.print()
    if (answer := _against_dataloader(outcome.runs)) is not None:
        console.print(f"[bold]{answer}[/]\n")
    console.print(_READING)
    limit = outcome.limit
    console.print(
        f"Limit of an epoch: {limit.seconds:.2f} s, set by {limit.bound_by} "
        f"(storage {limit.storage:.2f} s, training {limit.compute:.2f} s, "
        f"processors {limit.processors:.2f} s)."
    )


def _against_dataloader(runs: list[Run]) -> str | None:
    """Return a sentence that compares the two loaders; None where only one of them ran."""
    plain, others = _divided(runs)
    if plain is None or not others:
        return None
    best = min(others, key=lambda run: run.seconds)
    return (
        f"An epoch takes {plain.seconds:.2f} s with torch's DataLoader, which waits "
        f"{plain.mean('stall_seconds'):.2f} s of it for data, and {best.seconds:.2f} s with "
        f"Stoker's Loader and {best.recipe}, the fastest here, which waits "
        f"{best.mean('stall_seconds'):.2f} s."
    )


def _divided(runs: list[Run]) -> tuple[Run | None, list[Run]]:
    """Return the run with torch's DataLoader, if there is one, and those with recipes."""
    plain = next((run for run in runs if run.recipe == DATALOADER), None)
    return plain, [run for run in runs if run.recipe != DATALOADER]


def _cells(run: Run, limit: EpochLimit) -> list[str]:
    return [
        run.recipe,
        f"{run.accuracy:.1%}",
        f"{run.seconds:.2f}",
        f"{run.mean('stall_seconds'):.2f}",
        f"{run.hit_ratio:.1%}",
        "" if run.predicted is None else f"{run.predicted:.1%}",
        f"{run.mean('substituted') / run.mean('accesses'):.1%}",
        f"{run.mean('packaged') / run.mean('accesses'):.1%}",
        f"{run.mean('fetched'):.0f}",
        format_bytes(run.mean("bytes_from_source")),
        f"{run.seconds / limit.seconds:.2f}",
    ]


def save_plot(outcome: Outcome, path: Path) -> bool:
    """Save seconds and hits of each row as PNG; returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    plain, others = _divided(outcome.runs)
    # From the bottom up: the fastest recipe comes right below torch's DataLoader at the top.
    runs = sorted(others, key=lambda run: run.seconds, reverse=True) + ([plain] if plain else [])
    names = ["torch DataLoader" if run is plain else run.recipe for run in runs]
    figure = Figure(figsize=(10, 1.9 + 0.38 * len(runs)), layout="constrained")
    time, hits = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _plot_time(time, names, runs, outcome.limit.seconds)
    _plot_hits(hits, names, runs)
    figure.legend(fontsize="small", frameon=False, loc="outside lower center", ncols=5)
    for axis in (time, hits):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(outcome.title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return True


def _plot_time(axis: Axes, names: list[str], runs: list[Run], limit: float) -> None:
    """Draw the seconds of an epoch as bars, the time spent waiting in another colour."""
    seconds = [run.seconds for run in runs]
    stalls = [run.mean("stall_seconds") for run in runs]
    bars = axis.barh(names, seconds, color="#4c78a8", label="training")
    axis.barh(names, stalls, color="#e45756", label="waiting for data")
    axis.axvline(limit, color="black", linestyle="--", label="limit with this cache")
    told = [f"{s:.2f} s, waiting {w:.2f}" for s, w in zip(seconds, stalls, strict=True)]
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.bar_label(bars, told, padding=5, fontsize="small", bbox=plate)
    axis.set_xlim(0, 1.4 * max(seconds))  # room for the text behind the longest bar
    axis.set_xlabel("seconds an epoch")


def _plot_hits(axis: Axes, names: list[str], runs: list[Run]) -> None:
    """Draw the hits as bars, and what theory gives as marks."""
    axis.barh(names, [100 * run.hit_ratio for run in runs], color="#54a24b", label="hits")
    known = [
        (100 * run.predicted, name)
        for run, name in zip(runs, names, strict=True)
        if run.predicted is not None
    ]
    if known:
        axis.plot(*zip(*known, strict=True), "k|", markersize=14, label="hits that theory gives")
    axis.set_xlabel("hits, % of accesses")
