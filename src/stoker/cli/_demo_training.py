"""The demo's training: a small network, one loop, what each epoch cost."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stoker.cli._demo_data import DemoData, Settings, Storage
from stoker.cli._demo_loaders import BatchLoader, open_loader, predicted_hit_ratio
from stoker.epoch.stats import Stats

_RATE = 4e-3  # highest learning rate
_QUICK = 0.05  # of all steps: what else runs on the machine only ever makes a step slower


@dataclass(frozen=True)
class Epoch:
    """What one epoch cost and how its samples were served."""

    seconds: float
    """From the first batch asked for to the last step done."""
    stats: Stats
    """What the loader counted in this epoch alone."""


class StepCost(NamedTuple):
    """What training on one sample takes, without waiting for it."""

    wall: float
    """Seconds."""
    processor: float
    """Seconds of processor time, over all threads of the training process."""


@dataclass(frozen=True)
class Run:
    """One training with one loader."""

    recipe: str
    """The recipe of Stoker's Loader, or DATALOADER for torch's own."""
    predicted: float | None
    """Byte hit ratio that theory gives from the second epoch on; None where there is none."""
    accuracy: float
    """Share of the held-out images that the trained network names rightly."""
    epochs: list[Epoch]
    step: StepCost
    """A quick step's cost per sample: the one that only a twentieth of the steps fell below."""

    @property
    def later(self) -> list[Epoch]:
        """The epochs after the first, which fills the cache; the first if there is no other."""
        return self.epochs[1:] or self.epochs

    @property
    def seconds(self) -> float:
        """Mean seconds of a later epoch."""
        return statistics.fmean(epoch.seconds for epoch in self.later)

    def mean(self, counter: str) -> float:
        """Return the mean of a counter of Stats over the later epochs."""
        return statistics.fmean(getattr(epoch.stats, counter) for epoch in self.later)

    @property
    def hit_ratio(self) -> float:
        """Hits / accesses in the later epochs."""
        return self.mean("hits") / self.mean("accesses")

    @property
    def byte_hit_ratio(self) -> float:
        """Bytes from the cache / all bytes in the later epochs."""
        cached = self.mean("bytes_from_cache")
        return cached / (cached + self.mean("bytes_from_source"))


def build_features() -> nn.Module:
    """Return three convolutions: f32[B, 3, 32, 32] -> f32[B, 1024]."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise((3, 16, 32, 64)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten())


def as_input(images: Tensor) -> Tensor:
    """Return f32[B, 3, 32, 32] in -1..1 from u8."""
    return images.to(memory_format=torch.channels_last).float().div_(127.5).sub_(1)


class Trainer:
    """A network and its optimiser, the same from the first step in every run."""

    def __init__(self, num_classes: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.features = build_features()
        self.classifier = nn.Linear(64 * 4 * 4, num_classes)
        self.network = nn.Sequential(self.features, self.classifier)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=_RATE)

    def step(self, images: Tensor, targets: Tensor, loader: BatchLoader, done: float) -> None:
        """Train on one batch of ``loader``, at the share ``done`` of the training."""
        embeddings = self.features(as_input(images))
        logits = self.classifier(embeddings)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        loader.observe(losses, logits=logits, embeddings=embeddings, labels=targets)
        # By the share done and not by steps: recipes differ in the length of their epochs.
        for group in self.optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, 0.04 + done / 0.3, 1.001 - (done - 0.3) / 0.7)
        self.optimiser.zero_grad(set_to_none=True)
        (losses * loader.weights).mean().backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    @torch.no_grad()
    def rescore(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return f32[B], the losses of a batch without learning from it."""
        images, targets = batch
        self.network.eval()
        losses = nn.functional.cross_entropy(
            self.network(as_input(images)), targets, reduction="none"
        )
        self.network.train()
        return losses

    @torch.no_grad()
    def accuracy(self, data: DemoData) -> float:
        """Return the share of held-out images that the network names rightly."""
        self.network.eval()
        right = 0
        for images, targets in zip(
            torch.split(data.test_images, 512), torch.split(data.test_targets, 512), strict=True
        ):
            right += int((self.network(as_input(images)).argmax(1) == targets).sum())
        self.network.train()
        return right / len(data.test_targets)


@contextlib.contextmanager
def processors_left_by(workers: int) -> Iterator[None]:
    """Let torch compute with as many threads as the workers leave processors, at least one.

    Its threads wait for each other all the time: with more of them than free processors a step
    takes many times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    data: DemoData,
    storage: Storage,
    name: str,
    settings: Settings,
    advance: Callable[[float], object],
) -> Run:
    """Train a new network with the loader ``name``; tells ``advance`` the share done in each step.

    ``name`` is a recipe's, or DATALOADER.
    """
    trainer = Trainer(data.num_classes, settings.seed)
    with open_loader(data, storage, name, settings, trainer.rescore) as loader:
        epochs, costs = [], []
        for epoch in range(settings.epochs):
            before, started, steps = loader.stats, time.perf_counter(), len(loader)
            for step, (images, targets) in enumerate(loader):
                wall, processor = time.perf_counter(), time.process_time()
                done = (epoch + step / steps) / settings.epochs
                trainer.step(images, targets, loader, done)
                spent = time.perf_counter() - wall, time.process_time() - processor
                costs.append([seconds / len(targets) for seconds in spent])
                advance(1 / (steps * settings.epochs))
            seconds = time.perf_counter() - started
            epochs.append(Epoch(seconds, loader.stats.since(before)))
            loader.end_epoch(accuracy=trainer.accuracy(data))
    step_cost = StepCost(*np.quantile(costs, _QUICK, axis=0).tolist())
    predicted = predicted_hit_ratio(name, settings, data)
    return Run(name, predicted, trainer.accuracy(data), epochs, step_cost)
