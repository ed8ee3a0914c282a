"""What ``stoker simulate`` replays: made-up, fitted or recorded training, one job or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from stoker import recipes
from stoker.cli._options import as_seconds
from stoker.errors import ConfigError
from stoker.sim import Conditions, SimResult, Trace, replay
from stoker.sim.fitted import fit
from stoker.sim.jobs import MOST_JOBS, replay_jobs
from stoker.sim.played import RecordedLosses
from stoker.sim.signals import Losses, with_made_up_graph
from stoker.types import parse_bytes

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = [
    click.option(
        "--trace",
        type=_FILE,
        help="Replay the visits and losses that Loader(trace=FILE) recorded, with their sizes.",
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

    @classmethod
    def of(
        cls,
        draw_sizes: Callable[[int], NDArray[np.int64]],
        samples: int | None,
        epochs: int | None,
        batch: int | None,
        seed: int,
        trace: Path | None,
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
        return cls(sizes, epochs or 10, batch, seed, recorded, losses, jobs, conditions)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings to report, by name."""
        found: dict[str, Any] = {"samples": len(self.sizes), "epochs": self.epochs}
        found |= {"seed": self.seed, "jobs": self.jobs}
        if self.trace is not None:
            found["trace"] = self.trace.path.name
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
        return fit(trace).population(count, seed), count
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
