"""The demo's result: one table, how to read it, one plot, JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stoker.cli._demo_limit import EpochLimit
from stoker.cli._demo_training import Run, Settings
from stoker.types import format_bytes

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
    "Means over the epochs after the first, which fills the cache. stall: seconds that training "
    "waited for data. hits: share of accesses served from the cache without a read of the source; "
    "predicted: what theory gives, where it has a closed form; substituted: another sample was "
    "served; packaged: came with many others in one read. times limit: time of an epoch over the "
    "least possible one with this storage and this cache when each sample is visited once an "
    "epoch, which some recipes do not. Warm-ups of recipes are shortened to one or two epochs."
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
    # Eleven columns have to fit the 80 characters of a log.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for run in outcome.runs:
        table.add_row(*_cells(run, outcome.limit))
    console.print(f"\n[bold]{outcome.title}[/]")
    console.print(table)
    console.print()
    console.print(_READING)
    limit = outcome.limit
    console.print(
        f"Limit of an epoch: {limit.seconds:.2f} s, set by {limit.bound_by} "
        f"(storage {limit.storage:.2f} s, training {limit.compute:.2f} s, "
        f"processors {limit.processors:.2f} s)."
    )


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
    """Save seconds and hits by recipe as PNG; returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    runs = sorted(outcome.runs, key=lambda run: run.seconds, reverse=True)
    names = [run.recipe for run in runs]
    figure = Figure(figsize=(10, 1.6 + 0.38 * len(runs)), layout="constrained")
    time, hits = figure.subplots(1, 2, sharey=True)
    seconds = [run.seconds for run in runs]
    stalls = [run.mean("stall_seconds") for run in runs]
    time.barh(names, seconds, color="#4c78a8", label="training")
    time.barh(names, stalls, color="#e45756", label="waiting for data")
    time.axvline(outcome.limit.seconds, color="black", linestyle="--", label="limit")
    time.set_xlabel("seconds an epoch")
    hits.barh(names, [100 * run.hit_ratio for run in runs], color="#54a24b", label="measured")
    known = [(100 * run.predicted, run.recipe) for run in runs if run.predicted is not None]
    if known:
        hits.plot(*zip(*known, strict=True), "k|", markersize=14, label="predicted")
    hits.set_xlabel("hits, % of accesses")
    # The fastest recipe is at the top: there its bar leaves room, and the poorest hits below.
    for axis, place in ((time, "upper right"), (hits, "lower right")):
        axis.legend(fontsize="small", loc=place)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(outcome.title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return True
