"""``stoker demo``: one training on slow storage, with torch's DataLoader and with each recipe."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from stoker.cli._digits import write_digits
from stoker.cli._options import as_seconds, choose_loaders, need_torch

if TYPE_CHECKING:
    from stoker.cli._demo_data import Settings, Storage
    from stoker.cli._demo_report import Outcome


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
    from stoker.cli._demo_data import Settings, Storage
    from stoker.cli._demo_report import save_plot, show

    console = Console(stderr=as_json)
    storage = Storage(latency, iops)
    settings = Settings(cache, epochs, batch_size, workers, seed)
    with _folder(data, console) as folder:
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
    from stoker.cli._demo_data import DemoData
    from stoker.cli._demo_report import Outcome
    from stoker.cli._demo_training import measure_limit, processors_left_by, train

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
def _folder(data: Path | None, console: Console) -> Iterator[Path]:
    """Give the folder of images: the user's, or digits in a temporary one."""
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="stoker-demo-") as folder:
        with console.status("writing 1,797 handwritten digits as JPEG files"):
            write_digits(Path(folder))
        yield Path(folder)
