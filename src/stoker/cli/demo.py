"""``stoker demo``: one training on slow storage, with torch's DataLoader and with each recipe.

Its data are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
UCI Machine Learning Repository, 1998; CC BY 4.0), 8 x 8 pixels of 17 grey levels, unchanged in
``_digits.npz``, so that a demo needs no download.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stoker.cli._options import DATALOADER, as_seconds, choose_loaders, need_torch
from stoker.errors import ConfigError
from stoker.types import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from stoker.cli._demo_training import EpochLimit, Run
    from stoker.cli._loaders import Settings, Storage

COUNT = 1797
"""Images in the set."""
_SCALE = 4  # 32 x 32 pixels, so that decoding costs what it costs on CIFAR-10
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


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of class folders. Without it, 1,797 real handwritten digits are written first.",
)
@click.option(
    "--recipes",
    "names",
    default="belady,fifo,foresight,lfu,lru,minio,random,s3fifo,sieve",
    show_default=True,
    help="Names with commas, or all, which takes about five minutes. "
    "dataloader alone runs no recipe.",
)
@click.option(
    "--dataloader/--no-dataloader",
    "with_dataloader",
    default=True,
    show_default=True,
    help="Start with torch's own DataLoader, without a cache.",
)
@click.option("--cache", default="20%", show_default=True, help="Size, or share of the data.")
@click.option(
    "--latency",
    callback=as_seconds,
    default="5ms",
    show_default=True,
    help="Median latency of a read.",
)
@click.option(
    "--iops",
    type=click.FloatRange(min=0, min_open=True),
    default=1000,
    show_default=True,
    help="Reads a second that the storage serves, over all workers.",
)
@click.option("--epochs", type=click.IntRange(1), default=4, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option("--workers", type=click.IntRange(0), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the plot.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def demo(
    data: Path | None,
    names: str,
    with_dataloader: bool,
    cache: str,
    latency: float,
    iops: float,
    epochs: int,
    batch_size: int,
    workers: int,
    seed: int,
    output: Path,
    as_json: bool,
) -> None:
    """Train a small network on real images behind slow storage, once with each loader.

    The first is torch's own DataLoader with the same number of workers and no cache, the others are
    Stoker's with one recipe each. Prints one table (accuracy, seconds per epoch, stalls, hits, the
    limit that no cache can beat) and saves a plot.
    """
    chosen = choose_loaders(names, with_dataloader=with_dataloader)
    need_torch("demo")
    # torch takes seconds to load, so --help and errors do without it.
    from stoker.cli._loaders import Settings, Storage

    console = Console(stderr=as_json)
    storage = Storage(latency, iops)
    settings = Settings(cache, epochs, batch_size, workers, seed)
    with images_or_digits(data, console) as folder:
        outcome = _run(folder, chosen, storage, settings, console)
    if as_json:
        click.echo(json.dumps(outcome.to_json(), indent=1))
    else:
        show(outcome, console)
    plot = output / "demo.png"
    if save_plot(outcome, plot):
        console.print(f"Plot: {plot}")
    else:
        console.print("No plot: pip install 'stoker\\[plot]'")


def _run(
    folder: Path,
    chosen: list[str],
    storage: Storage,
    settings: Settings,
    console: Console,
) -> Outcome:
    """Train once with each loader, under progress bars."""
    from stoker.cli._demo_training import measure_limit, processors_left_by, train
    from stoker.cli._loaders import DemoData

    with console.status("reading the list of images"):
        data = DemoData.load(folder)
        settings.share_of(data)  # raises for an invalid cache size before any training
    with processors_left_by(settings.workers), _progress(console) as progress:
        bars = {name: progress.add_task(name, total=1.0, start=False) for name in chosen}
        runs = []
        for name, bar in bars.items():
            progress.start_task(bar)
            runs.append(train(data, storage, name, settings, partial(progress.advance, bar)))
            progress.stop_task(bar)
    title = (
        f"{len(data.paths):,} training images, {len(data.test_targets):,} held out; cache "
        f"{settings.cache}; storage {1000 * storage.latency:g} ms a read, "
        f"{storage.iops:g} reads a second"
    )
    return Outcome(title, settings, measure_limit(data, storage, settings, runs), runs)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>11}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@contextlib.contextmanager
def images_or_digits(folder: Path | None, console: Console) -> Iterator[Path]:
    """Give the folder of images: the user's, or digits in a temporary one."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="stoker-digits-") as own:
        with console.status("writing 1,797 handwritten digits as JPEG files"):
            write_digits(Path(own))
        yield Path(own)


def write_digits(folder: Path, copies: int = 1) -> Path:
    """Write ``folder/<digit>/<number>.jpg`` and return ``folder``; files that exist are kept.

    Each image is 32 x 32 pixels, about 1 KB as JPEG. ``copies`` above 1 writes each image that
    many times, shifted by a few pixels, where a measurement needs more files than there are
    digits. Raises ConfigError when Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"the digits are written with Pillow ({error}): pip install pillow, "
            "or give a folder of class folders with --data"
        ) from error
    with np.load(Path(__file__).with_name("_digits.npz")) as digits:
        levels, labels = digits["images"], digits["labels"]  # u8[1797, 8, 8] to 16; u8[1797]
    grey = np.rint(levels * (255 / 16)).astype(np.uint8)
    images = np.kron(grey, np.ones((1, _SCALE, _SCALE), np.uint8))
    for label in range(10):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
    for copy in range(copies):
        shifted = np.roll(images, (copy % 3 - copy // 3 % 3, copy // 9), axis=(1, 2))
        for number, (image, label) in enumerate(zip(shifted, labels, strict=True)):
            path = folder / str(label) / f"{copy * COUNT + number:06d}.jpg"
            if not path.exists():
                Image.fromarray(image).save(path, quality=90)
    return folder


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
