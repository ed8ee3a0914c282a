"""The demo's trainings: a small network with each loader, and the least time of an epoch.

Where training and decoding share processors, an epoch of A accesses takes at least

    T = max(m A / X_storage,  A compute,  A (compute_cpu + decode_cpu) / cores)

with m the miss ratio, X_storage = min(IOPS, concurrency / latency) in samples a second, compute the
wall time and compute_cpu, decode_cpu the processor time of one sample. No policy and no order in
which each sample is visited once an epoch has a miss ratio below 1 - c, with c the cached share of
the data: every reuse crosses one epoch boundary, and at most the cache survives it.

Times are those of the quick steps of the training itself and of the quickest decoding, since
other work on the machine can only add to them.
"""

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

from stoker.cli._loaders import DemoData, PlainLoader, Settings, Storage, open_loader, short
from stoker.cli._options import DATALOADER
from stoker.epoch.stats import Stats
from stoker.pytorch import Loader

_RATE = 4e-3  # highest learning rate
_QUICK = 0.05  # of all steps: other work on the machine can only make a step slower
_REPEATS = 3  # of the measurement of decoding


def predicted_hit_ratio(name: str, settings: Settings, data: DemoData) -> float | None:
    """Return the byte hit ratio that theory gives from the second epoch on; None without one."""
    if name == DATALOADER:
        return None
    return short(name).predicted_hit_ratio(settings.share_of(data))


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
    """Share of the held-out images that the trained network classifies correctly."""
    epochs: list[Epoch]
    step: StepCost
    """Cost per sample of a quick step: the 5 % quantile over all steps."""

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

    def step(
        self, images: Tensor, targets: Tensor, loader: Loader | PlainLoader, done: float
    ) -> None:
        """Train on one batch of ``loader``, at the share ``done`` of the training."""
        embeddings = self.features(as_input(images))
        logits = self.classifier(embeddings)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        loader.observe(losses, logits=logits, embeddings=embeddings, labels=targets)
        # By the share done, not by steps: recipes differ in the length of their epochs.
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
        """Return the share of held-out images that the network classifies correctly."""
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

    Its threads wait for each other constantly: with more threads than free processors a step takes
    many times as long.
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
    """Train a new network with the loader ``name``, a recipe or DATALOADER.

    Each step calls ``advance`` with the share of the training that it did.
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


@dataclass(frozen=True)
class EpochLimit:
    """The three lower bounds on the seconds of an epoch."""

    storage: float
    """Fetching what a cache of this size must miss."""
    compute: float
    """Training alone."""
    processors: float
    """Training and decoding, spread perfectly over all processors."""

    @property
    def seconds(self) -> float:
        """The largest of the three."""
        return max(self.storage, self.compute, self.processors)

    @property
    def bound_by(self) -> str:
        """Which of them it is."""
        bounds = {
            "storage": self.storage,
            "training": self.compute,
            "the processors": self.processors,
        }
        return max(bounds, key=lambda name: bounds[name])


def measure_limit(
    data: DemoData, storage: Storage, settings: Settings, runs: list[Run]
) -> EpochLimit:
    """Return the limit of an epoch from the quickest training steps and the cost of decoding."""
    accesses, cores = len(data.paths), len(os.sched_getaffinity(0))
    wall = min(run.step.wall for run in runs)
    processor = min(run.step.processor for run in runs) + _decode_seconds(data)
    delivered = storage.samples_per_second(max(1, settings.workers))
    return EpochLimit(
        storage=(1 - settings.share_of(data)) * accesses / delivered,
        compute=accesses * wall,
        processors=accesses * processor / cores,
    )


def _decode_seconds(data: DemoData) -> float:
    """Return the processor seconds to decode and transform one sample in memory."""
    times = []
    dataset = data.dataset(data.files())
    ids = np.random.default_rng(0).permutation(len(dataset))[:256]
    raw = [memoryview(sample) for sample in dataset.source.read(ids)]
    for _ in range(_REPEATS):
        started = time.process_time()
        for index, sample in zip(ids.tolist(), raw, strict=True):
            dataset.finish(index, dataset.decode(sample))
        times.append((time.process_time() - started) / len(raw))
    return min(times)
