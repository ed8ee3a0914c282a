"""``stoker bench``: what each recipe's cache hits, and the Loader beside torch's DataLoader."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stoker import recipes
from stoker.cli._options import SIZES_HELP, choose_recipes, draw_sizes, need_torch
from stoker.cli.demo import images_or_digits
from stoker.sim import replay
from stoker.types import parse_bytes

_BATCH = 32  # small against the data set, else hits within a batch count as older than they are


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option("--samples", type=click.IntRange(100), default=10_000, show_default=True)
@click.option("--epochs", type=click.IntRange(2), default=4, show_default=True)
@click.option("--cache", default="20%,40%,60%,80%", show_default=True, help="Sizes with commas.")
@click.option("--recipes", "names", default="all", show_default=True, help="Names with commas.")
@click.option(
    "--sizes", "given", default="lognormal:110000,0.8", show_default=True, help=SIZES_HELP
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def hits(
    samples: int, epochs: int, cache: str, names: str, given: str, seed: int, as_json: bool
) -> None:
    """Replay seeded uniform epochs through the real arena and policies.

    Shows hits and byte hits from the second epoch on, beside the closed form where there is one.
    When each sample is visited once per epoch, no policy's byte hits exceed the cache's share.
    """
    sizes = draw_sizes(given, samples, seed)
    total = int(sizes.sum())
    cases = [
        (name, share, parse_bytes(share, of=total, name="--cache"))
        for share in (part.strip() for part in cache.split(","))
        for name in choose_recipes(names, is_trained=False)
    ]
    rows = []
    bar = track(cases, "replaying", console=Console(stderr=True), transient=True)
    for name, share, size in bar:
        recipe = recipes.get(name)
        size = total if recipe.preload else size
        result = replay(
            recipe, samples, epochs, size, sizes=sizes, seed=seed, batch_size=_BATCH
        ).after(1)
        rows.append(
            {
                "recipe": name,
                "cache": share,
                "hit_ratio": result.hit_ratio,
                "byte_hit_ratio": result.byte_hit_ratio,
                "closed_form": recipe.predicted_hit_ratio(size / total),
                "bound": min(1.0, size / total),
            }
        )
    if as_json:
        click.echo(json.dumps({"samples": samples, "epochs": epochs, "rows": rows}, indent=1))
    else:
        _show_hits(rows, f"{samples:,} samples, epochs 2 to {epochs}, sizes {given}")


def _show_hits(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_style="bold")
    for name in ("recipe", "cache", "hits", "byte hits", "closed form", "bound"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for row in rows:
        shares = [row[k] for k in ("hit_ratio", "byte_hit_ratio", "closed_form", "bound")]
        cells = ["" if share is None else f"{share:.1%}" for share in shares]
        table.add_row(row["recipe"], row["cache"], *cells, end_section=row is rows[-1])
    Console().print(table)


@bench.command()
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

    Same files, decoder, transforms and workers, no training. Epochs alternate, and the first of
    each, which fills the caches, does not count. Images must all have the same size. Without
    FOLDER, 1,797 handwritten digits are written to a temporary one.
    """
    need_torch("bench loader")
    from stoker.cli._loaders import epoch_timers

    with (
        images_or_digits(folder, Console(stderr=True)) as images,
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
        _show_speeds(rows, f"{workers} workers, batches of {batch_size}, cache {cache}")


def _rows(results: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row per loader; speedup is the median over rounds of torch's time to its own."""
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


def _show_speeds(rows: list[dict[str, Any]], title: str) -> None:
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
