"""``stoker simulate``: replay recipes without model or storage, beside what theory allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stoker import recipes
from stoker.cli._options import SIZES_HELP, choose_recipes, draw_sizes
from stoker.cli._scenario import Scenario, scenario_options, timed
from stoker.errors import ConfigError
from stoker.sim import SimResult, limits
from stoker.sim.report import write_html, write_plot

_NEW_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--samples", type=click.IntRange(100), help="By default 20000, or the trace's.")
@click.option("--epochs", type=click.IntRange(2), help="By default 10, or the trace's.")
@click.option(
    "--cache",
    default="0.1,0.2,0.4",
    show_default=True,
    help="Shares of the data set's bytes, with commas: 0.2 or 20%.",
)
@click.option("--recipes", "names", default="all", show_default=True, help="Names with commas.")
@click.option("--sizes", "given", default="equal", show_default=True, help=SIZES_HELP)
@click.option("--batch", type=click.IntRange(1), help="By default 256 to 4096, or the trace's.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@scenario_options
@click.option("--plot", type=_NEW_FILE, help="Draw the curves into a picture: out.png, out.svg.")
@click.option("--html", type=_NEW_FILE, help="Write curves and tables as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def simulate(
    samples: int | None,
    epochs: int | None,
    cache: str,
    names: str,
    given: str,
    batch: int | None,
    seed: int,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay recipes with their own samplers, scores and caches.

    Losses are made up, unless --losses or --trace takes those of a recorded training. With
    --compute-rate the time of epochs is computed too.

    Hits are those of the second half of the epochs. The limit is the most that any cache of this
    size could hit: the largest number of samples that fit, and all accesses that repeat a sample
    within an epoch. Neighbours, for recipes that use them, are made up too.
    """
    scenario = Scenario.of(
        lambda count: draw_sizes(given, count, seed), samples, epochs, batch, seed, **options
    )
    sizes, epochs = scenario.sizes, scenario.epochs
    shares = [_share(part.strip()) for part in cache.split(",")]
    chosen = choose_recipes(names)
    rows = []
    with _bar(as_json) as bar:
        for share in shares:
            for name in chosen:
                task = bar.add_task(f"{name} at {share:.0%}", total=epochs * scenario.jobs)
                found = scenario.replay(name, share, lambda task=task: bar.advance(task))  # type: ignore[misc]
                bar.remove_task(task)
                rows.append(_row(found.after(epochs // 2), share, sizes))
    facts = scenario.facts | {"sizes": given, "batch": batch or "default"}
    if plot is not None:
        write_plot(plot, rows, facts, sizes)
    if html is not None:
        write_html(html, rows, facts, sizes)
    if as_json:
        click.echo(json.dumps({**facts, "rows": rows}, indent=1))
    else:
        _show(rows, f"{len(sizes):,} samples, epochs {epochs // 2 + 1} to {epochs}")


def _row(
    found: SimResult, share: float, sizes: np.ndarray[Any, np.dtype[np.int64]]
) -> dict[str, Any]:
    """Return the row of one replay."""
    accesses = sum(epoch.accesses for epoch in found.per_epoch)
    distinct = sum(epoch.coverage for epoch in found.per_epoch) * found.num_samples
    held = limits.smallest_first(sizes, share * float(sizes.sum()))
    # Accesses of an epoch are fewer than its samples where some are left out.
    crossing = min(1.0, held * found.num_samples * len(found.per_epoch) / accesses)
    recipe = recipes.get(found.recipe)
    limit = 1.0 if recipe.preload else float(limits.super_epochs(crossing, 1 - distinct / accesses))
    reads = sum(epoch.fetched + epoch.package_reads for epoch in found.per_epoch)
    return {
        "recipe": found.recipe,
        "cache": share,
        "hit_ratio": found.hit_ratio,
        "byte_hit_ratio": found.byte_hit_ratio,
        "substituted_ratio": found.substituted_ratio,
        "packaged_ratio": found.packaged_ratio,
        "limit": limit,
        "below_limit": limit - found.hit_ratio,
        "closed_form": recipe.predicted_hit_ratio(share),
        "ess": found.ess,
        "coverage": found.coverage,
        "reads_per_distinct_sample": reads / distinct,
        **timed(found),
    }


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=f"{title}, %", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    columns = {
        "recipe": "recipe",
        "hits": "hit_ratio",
        "bytes": "byte_hit_ratio",
        "subst.": "substituted_ratio",
        "pack.": "packaged_ratio",
        "limit": "limit",
        "below": "below_limit",
        "theory": "closed_form",
        "ESS/N": "ess",
    }
    if "epoch_seconds" in rows[0]:
        columns = {name: columns[name] for name in ("recipe", "hits", "limit", "below")}
        columns |= {"epoch s": "epoch_seconds", "stall s": "stall_seconds", "busy": "utilisation"}
    table.add_column("cache", justify="right", no_wrap=True)
    table.add_column("recipe", overflow="fold", min_width=12)  # parameters make names long
    for name in list(columns)[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        cells = [_cell(row[key], key) for key in columns.values()]
        is_last = after is None or after["cache"] != row["cache"]
        table.add_row(f"{100 * row['cache']:g}", *cells, end_section=is_last)
    Console().print(table)


def _cell(value: str | float | None, key: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if key.endswith("_seconds") else f"{100 * value:z.1f}"


def _bar(is_quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=is_quiet and not Console(stderr=True).is_terminal)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def _share(text: str) -> float:
    """Return the share that ``0.2`` or ``20%`` means; ConfigError for anything else."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--cache {text!r} is not a share: give 0.2 or 20%, at most all")
    return share
