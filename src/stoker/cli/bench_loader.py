"""``stoker bench loader``: Stoker's Loader against torch's DataLoader on a folder of images."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stoker.cli._digits import write_digits
from stoker.cli._torch import need_torch


@click.command()
@click.argument(
    "folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--workers", type=click.IntRange(0), default=2, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True)
@click.option("--cache", default="100%", show_default=True, help="Size, or share of the data.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def loader(
    folder: Path | None, workers: int, batch_size: int, cache: str, rounds: int, as_json: bool
) -> None:
    """Read a FOLDER of class folders with Stoker's Loader and with torch's DataLoader.

    Same files, decoder, transforms and workers, no training; epochs take turns, and the first of
    each, which fills the caches, does not count. Images must all have one size. Without FOLDER,
    1,797 handwritten digits are written to a temporary one.
    """
    need_torch("bench loader")
    from stoker.cli._loaders import epoch_timers

    with (
        _images(folder) as images,
        epoch_timers(images, workers, batch_size, cache) as timers,
    ):
        results: dict[str, list[float]] = {name: [] for name in timers}
        bar = track(range(rounds + 1), "epochs", console=Console(stderr=True), transient=True)
        for number in bar:
            for name, timer in timers.items():
                seconds = timer()
                if number:
                    results[name].append(seconds)
    rows = _rows(results)
    if as_json:
        click.echo(json.dumps({"workers": workers, "rows": rows}, indent=1))
    else:
        _show(rows, f"{workers} workers, batches of {batch_size}, cache {cache}")


def _rows(results: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row a loader; the ratio is the median over rounds of torch's time over it."""
    plain = results["torch DataLoader"]
    return [
        {
            "loader": name,
            "us_per_sample": 1e6 * statistics.median(times),
            "samples_per_second": 1 / statistics.median(times),
            "speedup": statistics.median(b / a for a, b in zip(times, plain, strict=True)),
        }
        for name, times in results.items()
    ]


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_style="bold")
    for name in ("loader", "µs a sample", "samples/s", "against torch"):
        table.add_column(name, justify="left" if name == "loader" else "right")
    for row in rows:
        table.add_row(
            row["loader"],
            f"{row['us_per_sample']:.1f}",
            f"{row['samples_per_second']:,.0f}",
            f"{row['speedup']:.2f} x",
        )
    Console().print(table)


@contextlib.contextmanager
def _images(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        yield write_digits(Path(own))
