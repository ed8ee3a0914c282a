"""``stoker simulate``: replay recipes, beside what theory allows; ``stoker report``: a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stoker import recipes
from stoker.cli._options import SIZES_HELP, as_seconds, choose_recipes, draw_cached, draw_sizes
from stoker.errors import ConfigError
from stoker.sim import Conditions, SimResult, Trace, limits, replay
from stoker.sim.jobs import MOST_JOBS, replay_jobs
from stoker.sim.played import RecordedLosses
from stoker.sim.replay import held_share
from stoker.sim.report import write_html, write_plot, write_trace_report
from stoker.sim.signals import Losses, fit_losses, with_made_up_graph
from stoker.types import parse_bytes

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = [
    click.option(
        "--trace",
        type=_FILE,
        help="Replay the visits and losses that Loader(trace=FILE) recorded, with their sizes.",
    ),
    click.option(
        "--cached-sizes",
        help="Sizes of samples as they are cached: a factor, like the 0.3 that `stoker doctor` "
        "measures for Cache(stage='resized:288'), or a file of sizes. --cache is still a share of "
        "the bytes that are read.",
    ),
    click.option(
        "--losses",
        "loss_source",
        metavar="KIND:TRACE",
        help="Losses for the recipes' own samplers: fitted:TRACE draws a population of any size "
        "like that of a recorded training, recorded:TRACE takes its samples.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(1, MOST_JOBS),
        default=1,
        show_default=True,
        help="Trainings that run at once over one cache, each with its own order.",
    ),
    click.option(
        "--compute-rate",
        type=click.FloatRange(0, min_open=True),
        help="Samples a second that training takes. Adds the time of epochs, by these:",
    ),
    click.option(
        "--latency",
        callback=as_seconds,
        default="5ms",
        show_default=True,
        help="Median latency of a request.",
    ),
    click.option(
        "--tail",
        type=click.FloatRange(0),
        default=0.5,
        show_default=True,
        help="Sigma of the latency.",
    ),
    click.option("--iops", type=click.FloatRange(0, min_open=True), help="Requests per second."),
    click.option("--bandwidth", help="Bytes per second, like 500MB."),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Requests of prefetch at once.",
    ),
    click.option(
        "--decode",
        callback=as_seconds,
        default="0ms",
        show_default=True,
        help="Time to decode a sample on one worker.",
    ),
    click.option("--workers", type=click.IntRange(0), default=4, show_default=True),
]
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)


def scenario_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that :meth:`Scenario.of` takes to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Scenario:
    """What is replayed, independent of recipe and cache."""

    sizes: NDArray[np.int64]
    """``i64[N]``, bytes."""
    epochs: int
    batch: int | None
    seed: int
    trace: Trace | None
    losses: Losses | None
    jobs: int
    conditions: Conditions | None
    cached: NDArray[np.int64]
    """``i64[N]``, bytes as they are cached."""

    @classmethod
    def of(
        cls,
        draw_sizes: Callable[[int], NDArray[np.int64]],
        samples: int | None,
        epochs: int | None,
        batch: int | None,
        seed: int,
        trace: Path | None,
        cached_sizes: str | None,
        loss_source: str | None,
        jobs: int,
        **time: Any,
    ) -> Scenario:
        """Return the scenario of these options; a trace supplies what they leave out.

        Raises ConfigError for options that contradict each other.
        """
        recorded = None if trace is None else Trace(trace)
        if recorded is not None and (loss_source is not None or jobs > 1):
            raise ConfigError(
                "--trace has its own losses, of one job: leave out --losses and --jobs"
            )
        conditions = _conditions(**time)
        if conditions is not None and jobs > 1:
            raise ConfigError("--compute-rate is for one job: leave out --jobs")
        count = samples
        if recorded is not None:
            count, epochs = _as_recorded(recorded, samples, epochs)
            sizes = recorded.sizes
        losses = None
        if loss_source is not None:
            losses, count = _losses(loss_source, samples, seed)
        if recorded is None:
            sizes = draw_sizes(count or 20_000)
        cached = sizes if cached_sizes is None else draw_cached(cached_sizes, sizes)
        return cls(sizes, epochs or 10, batch, seed, recorded, losses, jobs, conditions, cached)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings to report, by name."""
        found: dict[str, Any] = {"samples": len(self.sizes), "epochs": self.epochs}
        found |= {"seed": self.seed, "jobs": self.jobs}
        if self.trace is not None:
            found["trace"] = self.trace.path.name
        if self.cached is not self.sizes:
            found["cached_factor"] = round(float(self.cached.sum() / self.sizes.sum()), 4)
        return found

    def replay(self, name: str, share: float, progress: Callable[[], None]) -> SimResult:
        """Return what a recipe hits; with several jobs, all of them together."""
        count, recipe = len(self.sizes), recipes.get(name)
        if self.trace is None:
            recipe = with_made_up_graph(recipe, self.seed)
        if self.jobs > 1:
            return replay_jobs(
                [recipe] * self.jobs,
                count,
                self.epochs,
                share,
                sizes=self.sizes,
                losses=self.losses,
                seeds=range(self.seed, self.seed + self.jobs),
                batch_size=self.batch,
                cached=self.cached,
                progress=progress,
            ).together
        return replay(
            recipe,
            count,
            self.epochs,
            share,
            sizes=self.sizes,
            losses=self.losses,
            trace=self.trace,
            seed=self.seed,
            batch_size=self.batch,
            cached=self.cached,
            conditions=self.conditions,
            progress=progress,
        )


def timed(found: SimResult) -> dict[str, float]:
    """Return what a row says of time; nothing where it was not computed."""
    if found.seconds != found.seconds:  # NaN
        return {}
    epochs = len(found.per_epoch)
    return {
        "epoch_seconds": found.seconds / epochs,
        "stall_seconds": found.stall_seconds / epochs,
        "utilisation": found.utilisation,
    }


def _as_recorded(trace: Trace, samples: int | None, epochs: int | None) -> tuple[int, int]:
    if samples not in (None, trace.num_samples):
        raise ConfigError(f"--samples {samples}: the trace has {trace.num_samples}, leave it out")
    if epochs is not None and epochs > len(trace):
        raise ConfigError(f"--epochs {epochs}: the trace has {len(trace)}, give no more")
    return trace.num_samples, epochs or len(trace)


def _losses(source: str, samples: int | None, seed: int) -> tuple[Losses, int]:
    """Return the losses that ``fitted:TRACE`` or ``recorded:TRACE`` means, of how many samples."""
    kind, _, path = source.partition(":")
    if kind not in ("fitted", "recorded") or not Path(path).is_file():
        raise ConfigError(f"--losses {source!r}: give fitted:TRACE or recorded:TRACE, a file")
    trace = Trace(path)
    if kind == "fitted":
        count = samples or trace.num_samples
        return fit_losses(trace).population(count, seed), count
    return RecordedLosses(trace), _as_recorded(trace, samples, None)[0]


def _conditions(
    compute_rate: float | None,
    latency: float,
    tail: float,
    iops: float | None,
    bandwidth: str | None,
    concurrency: int,
    decode: float,
    workers: int,
) -> Conditions | None:
    if compute_rate is None:
        return None
    infinite = float("inf")
    return Conditions(
        compute_rate,
        latency=latency,
        tail=tail,
        iops=iops or infinite,
        bandwidth=infinite if bandwidth is None else parse_bytes(bandwidth, name="--bandwidth"),
        concurrency=concurrency,
        decode_seconds=decode,
        workers=workers,
    )


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
    epochs, whole = scenario.epochs, int(scenario.sizes.sum())
    shares = [_share(part.strip()) for part in cache.split(",")]
    chosen = choose_recipes(names)
    rows = []
    with _bar(as_json) as bar:
        for share in shares:
            for name in chosen:
                task = bar.add_task(f"{name} at {share:.0%}", total=epochs * scenario.jobs)
                found = scenario.replay(name, share, lambda task=task: bar.advance(task))  # type: ignore[misc]
                bar.remove_task(task)
                rows.append(_row(found.after(epochs // 2), share, scenario))
    facts = scenario.facts | {"sizes": given, "batch": batch or "default"}
    if plot is not None:
        write_plot(plot, rows, facts, scenario.cached, whole)
    if html is not None:
        write_html(html, rows, facts, scenario.cached, whole)
    if as_json:
        click.echo(json.dumps({**facts, "rows": rows}, indent=1))
    else:
        _show(rows, f"{len(scenario.sizes):,} samples, epochs {epochs // 2 + 1} to {epochs}")


@click.command()
@click.argument("trace", type=_FILE)
@click.option(
    "--output",
    "-o",
    type=_NEW_FILE,
    help="The page to write; by default TRACE.html.",
)
def report(trace: Path, output: Path | None) -> None:
    """Write what a training recorded with Loader(trace=FILE) did, as one HTML page.

    Epochs with hits beside the most that are possible, the share of waiting, the waits for batches
    and the sizes of samples. The page loads nothing.
    """
    path = trace.with_name(f"{trace.name}.html") if output is None else output
    with Trace(trace) as recorded:
        write_trace_report(path, recorded)
    click.echo(f"wrote {path}")


def _row(found: SimResult, share: float, scenario: Scenario) -> dict[str, Any]:
    """Return the row of one replay."""
    accesses = sum(epoch.accesses for epoch in found.per_epoch)
    distinct = sum(epoch.coverage for epoch in found.per_epoch) * found.num_samples
    held = limits.smallest_first(scenario.cached, share * float(scenario.sizes.sum()))
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
        "closed_form": recipe.predicted_hit_ratio(
            held_share(share, scenario.sizes, scenario.cached)
        ),
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
