"""What a Loader or a Feed counts, where a training is logged.

::

    log = Log(loader, to_tensorboard(SummaryWriter()))
    for step, (images, labels) in enumerate(loader):
        ...
        if step % 100 == 0:
            log(step)

The names, units and meanings are those of ``stoker.jobs.metrics``, as for Prometheus. None of the
packages is needed by this module: each function takes what the user has made of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from stoker.epoch.stats import Stats
from stoker.jobs.metrics import COUNTS, Metric

__all__ = ["Log", "observe_with", "to_lightning", "to_mlflow", "to_tensorboard", "to_wandb"]

Values = Mapping[str, float]
Sink = Callable[[Values, int], None]
"""Takes values by name, and the step that they belong to."""


class Training(Protocol):
    """A Loader or a Feed."""

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        ...


class Log:
    """Logs the counts of ``training`` to ``sinks`` each time it is called with a step.

    Counters are totals; ``hit_ratio``, ``stall_share`` and ``samples_per_second`` are of the time
    since the call before. Names begin with ``prefix``. To be called by the thread of the training
    loop. What a sink raises is raised.
    """

    def __init__(self, training: Training, *sinks: Sink, prefix: str = "stoker/") -> None:
        self._training, self._sinks, self._prefix = training, sinks, prefix
        self._before = training.stats

    def __call__(self, step: int) -> None:
        """Log what was counted up to ``step``."""
        now = self._training.stats
        spent, self._before = now.since(self._before), now
        told = {
            **{_name(metric): float(getattr(now, metric.field)) for metric in COUNTS},
            "hit_ratio": spent.hits / max(1, spent.accesses),
            "stall_share": min(1.0, spent.stall_seconds / max(1e-9, spent.epoch_seconds)),
            "samples_per_second": spent.accesses / max(1e-9, spent.epoch_seconds),
        }
        values = {self._prefix + name: value for name, value in told.items()}
        for sink in self._sinks:
            sink(values, step)


def to_tensorboard(writer: Any) -> Sink:
    """Return what adds scalars to a ``SummaryWriter`` (torch's or tensorboardX's)."""

    def sink(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return sink


def to_wandb(run: Any) -> Sink:
    """Return what logs to a run of Weights & Biases, as ``wandb.init()`` gives it."""
    return lambda values, step: run.log(dict(values), step=step)


def to_mlflow(client: Any, run_id: str) -> Sink:
    """Return what logs to a run of MLflow, by an ``MlflowClient``."""

    def sink(values: Values, step: int) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    return sink


def to_lightning(logger: Any) -> Sink:
    """Return what logs to any of Lightning's loggers."""
    return lambda values, step: logger.log_metrics(dict(values), step=step)


def observe_with(meter: Any, training: Training) -> None:
    """Have a ``Meter`` of OpenTelemetry observe the counts of ``training`` when it collects.

    Instruments are named ``stoker.job.FAMILY``, with their label as attribute; bytes have the unit
    ``By``, seconds ``s``. The counts are read by OpenTelemetry's thread, which is safe.
    """
    import opentelemetry.metrics as api

    families: dict[str, list[Metric]] = {}
    for metric in COUNTS:
        families.setdefault(metric.family, []).append(metric)
    for family, metrics in families.items():

        def collect(_: Any, metrics: list[Metric] = metrics) -> Iterable[Any]:
            stats = training.stats
            for metric in metrics:
                attributes = {} if metric.label is None else dict([metric.label])
                yield api.Observation(getattr(stats, metric.field), attributes)

        first = metrics[0]
        create = getattr(meter, f"create_observable_{first.kind}")
        create(f"stoker.job.{family}", [collect], unit=unit_of(first), description=first.help)


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric by UCUM: ``By``, ``s`` or ``1``."""
    if "bytes" in metric.family:
        return "By"
    return "s" if metric.family.endswith("seconds") else "1"


def _name(metric: Metric) -> str:
    return metric.family if metric.label is None else f"{metric.family}/{metric.label[1]}"
