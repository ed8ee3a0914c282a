"""Stands in for Ray: one worker, in this process, which fails once and goes on from a checkpoint.

The network notes, in the file that SEEN names, what each batch found: a line of JSON with the
attempt, the numbers of its images (their pixels), and the sum of the parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# What the example imports of Ray is all here.
train = sys.modules[__name__]
sys.modules["ray.train"] = sys.modules["ray.train.torch"] = train

FAILS_AT = 6  # the batch, of the first attempt

RunConfig = FailureConfig = ScalingConfig = SimpleNamespace


class WorkerDied(Exception):
    """What the first attempt ends with."""


class Checkpoint:
    """A folder that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def from_directory(cls, folder: str) -> Checkpoint:
        return cls(Path(folder))

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.folder)


class NotingNetwork(torch.nn.Module):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.batches = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        if _run.attempt == 0 and self.batches == FAILS_AT:
            raise WorkerDied
        numbers = (images[:, 0, 0, 0] * 255).round().int().tolist()
        weights = sum(parameter.sum().item() for parameter in self.network.parameters())
        with Path(os.environ["SEEN"]).open("a") as notes:
            note = {"attempt": _run.attempt, "numbers": numbers, "weights": weights}
            notes.write(json.dumps(note) + "\n")
        return self.network(images)


class TorchTrainer:
    def __init__(
        self,
        train: Callable[[dict[str, Any]], None],
        *,
        train_loop_config: dict[str, Any],
        scaling_config: SimpleNamespace,
        run_config: SimpleNamespace,
    ) -> None:
        self._train, self._config, self._run_config = train, train_loop_config, run_config

    def fit(self) -> SimpleNamespace:
        _run.storage = Path(self._run_config.storage_path)
        for _run.attempt in range(1 + self._run_config.failure_config.max_failures):
            with contextlib.suppress(WorkerDied):
                self._train(self._config)
                break
        return SimpleNamespace(metrics=_run.metrics)


_run = SimpleNamespace(attempt=0, storage=None, checkpoint=None, metrics=None, reports=0)


def report(metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
    _run.metrics = metrics
    _run.reports += 1
    if checkpoint is not None:
        folder = _run.storage / f"checkpoint_{_run.reports:06}"
        _run.checkpoint = Checkpoint(Path(shutil.copytree(checkpoint.folder, folder)))


def get_checkpoint() -> Checkpoint | None:
    return _run.checkpoint


def get_context() -> SimpleNamespace:
    return SimpleNamespace(get_world_rank=lambda: 0)


def get_device() -> torch.device:
    return torch.device("cpu")


def prepare_model(network: torch.nn.Module) -> NotingNetwork:
    return NotingNetwork(network)
