"""``stoker bench hits``: what each recipe's cache serves, beside what theory says."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stoker import recipes
from stoker.cli._choice import choose_recipes
from stoker.cli._sizes import SIZES_HELP, draw_sizes
from stoker.sim import replay
from stoker.types import parse_bytes

_BATCH = 32  # small against the data set, else hits within a batch count as older than they are


@click.command()
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
    When each sample is visited once an epoch, no policy's byte hits exceed the cache's share.
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
        _show(rows, f"{samples:,} samples, epochs 2 to {epochs}, sizes {given}")


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_style="bold")
    for name in ("recipe", "cache", "hits", "byte hits", "closed form", "bound"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for row in rows:
        shares = [row[k] for k in ("hit_ratio", "byte_hit_ratio", "closed_form", "bound")]
        cells = ["" if share is None else f"{share:.1%}" for share in shares]
        table.add_row(row["recipe"], row["cache"], *cells, end_section=row is rows[-1])
    Console().print(table)
