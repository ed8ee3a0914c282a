"""The counts of a Feed in TensorBoard, Weights & Biases, MLflow, Lightning and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.vision import spare_torchvision_its_operators

import stoker
from stoker.jobs.metrics import COUNTS
from stoker.loggers import (
    Log,
    observe_with,
    to_lightning,
    to_mlflow,
    to_tensorboard,
    to_wandb,
)
from stoker.source import MemorySource

BYTES = "stoker/bytes/source"


@pytest.fixture
def feed() -> Iterator[stoker.Feed]:
    source = MemorySource([bytes([n]) * 100 for n in range(60)])
    cache = stoker.Cache("50%", stands_aside=False)
    with stoker.Feed(source, 10, epochs=2, cache=cache, recipe="minio") as feed:
        yield feed


def test_every_metric_is_logged_with_the_same_name(feed: stoker.Feed) -> None:
    found: list[tuple[dict[str, float], int]] = []
    log = Log(feed, lambda values, step: found.append((dict(values), step)), prefix="")
    for epoch in range(2):
        list(feed)
        log(10 * epoch)
    (first, _), (second, step) = found
    assert step == 10 and len(first) == len(COUNTS) + 3
    assert (first["accesses"], second["accesses"]) == (60, 120), "counters are totals"
    assert first["hit_ratio"] == 0 and 0.4 < second["hit_ratio"] < 0.6, "ratios are of the interval"
    assert first["bytes/source"] == 6000 and second["samples_per_second"] > 0
    assert 0 <= second["stall_share"] <= 1


def test_tensorboard(feed: stoker.Feed, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log = Log(feed, to_tensorboard(writer))
        list(feed)
        log(6)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars(BYTES)
    assert (event.step, event.value) == (6, 6000)


def test_weights_and_biases(
    feed: stoker.Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="stoker") as run:
        log = Log(feed, to_wandb(run))
        list(feed)
        log(6)
        run.log({}, step=7)  # what is of step 6 is complete then
        assert run.summary[BYTES] == 6000
    assert list(tmp_path.rglob("run-*.wandb"))


def test_mlflow(feed: stoker.Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    run_id = client.create_run(client.create_experiment("stoker")).info.run_id
    log = Log(feed, to_mlflow(client, run_id))
    list(feed)
    log(6)
    (metric,) = client.get_metric_history(run_id, BYTES)
    assert (metric.step, metric.value) == (6, 6000)


def test_lightnings_loggers(feed: stoker.Feed, tmp_path: Path) -> None:
    spare_torchvision_its_operators()
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="lightning is not installed")
    logger = loggers.CSVLogger(str(tmp_path))
    log = Log(feed, to_lightning(logger))
    list(feed)
    log(6)
    logger.save()
    (file,) = tmp_path.rglob("metrics.csv")
    head, row = file.read_text().splitlines()
    told = dict(zip(head.split(","), row.split(","), strict=True))
    assert (told["step"], float(told[BYTES])) == ("6", 6000)


def test_opentelemetry(feed: stoker.Feed) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="opentelemetry-sdk is not there")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    observe_with(sdk.MeterProvider([reader]).get_meter("stoker"), feed)
    list(feed)
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    assert set(found) == {f"stoker.job.{metric.family}" for metric in COUNTS}
    read = found["stoker.job.bytes"]
    assert read.unit == "By" and read.description == "Bytes of samples, by where they came from."
    by_tier = {point.attributes["tier"]: point.value for point in read.data.data_points}
    assert by_tier == {"cache": 0, "source": 6000, "disk": 0, "pool": 0}
    assert found["stoker.job.stall_seconds"].unit == "s"
