"""One training of the trial: live through the Loader, its time kept by a virtual clock, or real.

Samples are served by the real Loader and cache. What storage would have cost is computed, batch
after batch, from how each sample was really served, by the clock of :mod:`stoker.sim`, so that
times do not depend on what else this machine does; or storage with those limits is read in real
time, by workers and prefetch. Pictures are decoded once beforehand.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from importance_data import Images
from importance_model import Trainer
from numpy.typing import NDArray

import stoker
from stoker.recipes import Recipe
from stoker.sampler.super_epochs import AdaptiveSampler
from stoker.sim import Conditions
from stoker.sim.clock import Clock
from stoker.testing import SlowSource
from trial.contestants import CACHE

COUNTS = (
    "accesses",
    "hits",
    "substituted",
    "packaged",
    "fetched",
    "rescored",
    "package_reads",
    "rebuild_reads",
    "repack_reads",
    "bytes_from_source",
)
BANDWIDTH = 100e6
"""Bytes a second of the storage: with samples of 1 KB requests are what limits it."""

OWN_COST = 0.005, 0.00125
"""Seconds that the Loader itself takes at the start of an epoch, and for a batch: what
virtual_time.py measured on two cores with everything cached."""


@dataclass(frozen=True)
class Storage:
    """The storage, and the processor that trains."""

    reads: float = 1_000.0
    """Requests a second that storage serves."""
    compute: float = 5_000.0
    """Samples a second that training takes when it never waits."""
    latency: float = 0.002
    """Seconds of a request."""

    def slow(self, source: Any) -> SlowSource:
        """Return ``source`` behind these limits in real time."""
        return SlowSource(
            source,
            latency=self.latency,
            tail=0,
            iops=self.reads,
            bandwidth=BANDWIDTH,
            concurrency=64,
        )

    def conditions(self, total_bytes: float, mean: float, batch_size: int) -> Conditions:
        """Return them as the clock takes them, with the Loader's own window of prefetch."""
        window = max(0.05 * CACHE * total_bytes, min(6 * batch_size * mean, total_bytes / 20))
        return Conditions(
            compute_rate=self.compute,
            iops=self.reads,
            latency=self.latency,
            bandwidth=BANDWIDTH,
            window_bytes=window,
            start_seconds=OWN_COST[0],
            batch_seconds=OWN_COST[1],
        )


@dataclass(frozen=True)
class Stage:
    """What all trainings have in common."""

    images: Images
    pixels: torch.Tensor
    """u8[N, 3, 32, 32], the training images decoded."""
    model: str
    batch_size: int
    storage: Storage
    device: str = "cpu"
    """Where the network is, and where :attr:`pixels` are."""

    def on(self, device: str) -> Stage:
        """Return the same there."""
        return replace(self, pixels=self.pixels.to(device), device=device)

    @property
    def total_bytes(self) -> int:
        """Bytes of all training images."""
        return int(self.images.source.sizes.sum())


class VirtualClock:
    """Seconds of each epoch, from how the Loader served its batches.

    Reads by which packages are built, and reads of packages, are requests as any other. Samples
    rescored before an epoch are read, or computed at three times the rate of training, before
    anything else.
    """

    def __init__(
        self,
        stage: Stage,
        sizes: NDArray[np.int64],
        loader: stoker.Loader,
        recipe: Recipe,
        knows_next: bool,
    ) -> None:
        self._mean = float(sizes.mean())
        given = stage.storage.conditions(float(sizes.sum()), self._mean, stage.batch_size)
        self._clock = Clock(given, sizes, knows_next=knows_next)
        self._loader, self._storage = loader, stage.storage
        self._has_packages = recipe.packaging is not None
        self._before = loader.stats
        self._began = self._before
        self.rescored = 0
        """Samples rescored since the last epoch ended."""

    def batch(self) -> None:
        """Take the latest batch."""
        reads, num_bytes = 0, 0.0
        if self._has_packages:
            now = self._loader.stats
            spent, self._before = now.since(self._before), now
            reads = spent.package_reads + spent.rebuild_reads + spent.repack_reads
            num_bytes = spent.package_bytes + spent.rebuild_reads * self._mean
        self._clock.add(
            self._loader.last_ids, self._loader.last_outcomes, reads, num_bytes / max(1, reads)
        )

    def end_epoch(self) -> dict[str, float]:
        """Return what was counted in the epoch, its seconds, and what storage supplied."""
        spent, self._began = self._loader.stats.since(self._began), self._loader.stats
        time = self._clock.end_epoch()
        found = {name: float(getattr(spent, name)) for name in COUNTS}
        supply = math.nan
        if spent.fetched and time.seconds:
            supply = time.utilisation * spent.fetched / spent.accesses
        computing = self.rescored / (3 * self._storage.compute)
        aside = max(spent.rescored / self._storage.reads, computing)
        self.rescored = 0
        seconds = time.seconds + aside
        return found | {"seconds": seconds, "stall": time.stall_seconds + aside, "supply": supply}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do what belongs to no epoch; this clock does not see it anyway."""
        yield


class RealClock:
    """Seconds of each epoch as they pass, what prefetch and workers need to start included."""

    def __init__(self, loader: stoker.Loader) -> None:
        self._loader, self._before = loader, loader.stats
        self._began = time.perf_counter()
        self.rescored = 0

    def batch(self) -> None:
        """Take the latest batch."""

    def end_epoch(self) -> dict[str, float]:
        """Return what was counted in the epoch, and its seconds."""
        spent, self._before = self._loader.stats.since(self._before), self._loader.stats
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        found = {name: float(getattr(spent, name)) for name in COUNTS}
        return found | {"seconds": seconds, "stall": spent.stall_seconds, "supply": math.nan}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do what belongs to no epoch."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


class _Told:
    """Scores with what the virtual storage supplied in place of what this machine's did."""

    def __init__(self, scores: Any, supplies: list[float]) -> None:
        self._scores, self.supplies = scores, np.array(supplies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scores, name)


class _ByVirtualTime:
    """A sampler that goes by what the virtual storage supplied."""

    def __init__(self, sampler: AdaptiveSampler, supplies: list[float]) -> None:
        self._sampler, self._supplies = sampler, supplies

    def plan(self, scores: Any, epoch: int) -> Any:
        return self._sampler.plan(self._told(scores), epoch)

    def foresees(self, scores: Any, epoch: int) -> bool:
        return self._sampler.foresees(self._told(scores), epoch)

    def describe(self, scores: Any, epoch: int) -> str:
        return self._sampler.describe(self._told(scores), epoch)

    def _told(self, scores: Any) -> Any:
        return None if scores is None else _Told(scores, self._supplies)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def by_virtual_time(recipe: Recipe, supplies: list[float]) -> Recipe:
    """Return ``recipe``, with an adaptive sampler going by ``supplies`` as they grow."""

    def sampler(*args: Any, **job: Any) -> Any:
        own = recipe.sampler(*args, **job)
        return _ByVirtualTime(own, supplies) if isinstance(own, AdaptiveSampler) else own

    return replace(recipe, sampler=partial(sampler))


def train(
    stage: Stage,
    recipe: Recipe,
    epochs: int,
    seed: int,
    rate: float,
    held: tuple[torch.Tensor, torch.Tensor],
    taken_over: dict[str, Any] | None = None,
    workers: int = 0,
) -> dict[str, Any]:
    """Train; return accuracies on ``held``, and what each epoch cost.

    ``taken_over``: what came out of another training with the same plan. Then nothing is computed,
    the cache only serves, and RuntimeError is raised if other samples come than did there.
    ``workers``: read storage in real time with so many, and with prefetch.
    """
    images, supplies = stage.images, list[float]()
    targets = torch.from_numpy(images.targets).to(stage.device)
    trainer = Trainer(stage.model, images.num_classes, seed, rate, stage.device)
    clocks: list[VirtualClock | RealClock] = []

    def rescore(ids: torch.Tensor) -> torch.Tensor:
        clocks[0].rescored += len(ids)
        return trainer.rescore((stage.pixels[ids], targets[ids]))

    job = {"seed": seed, "shuffle": True, "pad_to": 1, "drop_last": False, "epochs": epochs}
    knows_next = not recipe.sampler(len(images), **job).uses_scores
    names, accuracies, found = [], [], []
    by_class = np.zeros(images.num_classes)
    with stoker.Loader(
        stoker.SampleDataset(
            stage.storage.slow(images.source) if workers else images.source,
            len,
            None,
            np.arange(len(images)),
        ),
        batch_size=stage.batch_size,
        collate_fn=lambda samples: torch.tensor([sample_id for _, sample_id in samples]),
        cache=f"{CACHE:.0%}" if workers else stoker.Cache(f"{CACHE:.0%}", prefetch=0),
        recipe=recipe if workers else by_virtual_time(recipe, supplies),
        epochs=epochs,
        seed=seed,
        rescore=rescore if recipe.scorer(len(images)).rescores else None,
        num_workers=workers,
        persistent_workers=workers > 0,
    ) as loader:
        clocks.append(
            RealClock(loader)
            if workers
            else VirtualClock(stage, images.source.sizes, loader, recipe, knows_next)
        )
        step = _stepping(stage, trainer, loader, targets) if taken_over is None else None
        for epoch in range(epochs):
            plan = hashlib.sha1()
            for number, ids in enumerate(loader):
                plan.update(loader.last_ids.tobytes())
                clocks[0].batch()
                if step is not None:
                    step(ids, (epoch + number / len(loader)) / epochs)
            names.append(plan.hexdigest()[:12])
            if step is not None:
                with clocks[0].stopped():
                    by_class = trainer.accuracies(*held, images.num_classes)
                accuracies.append(float(by_class.mean()))
                loader.end_epoch(accuracy=accuracies[-1])
            else:
                loader.end_epoch()
            now = clocks[0].end_epoch()
            supplies.append(now["supply"])
            found.append(now | {"ess": loader.stats.ess, "coverage": loader.stats.coverage})
    result = {"by_epoch": accuracies, "worst_class": float(by_class.min()), "plan": names}
    if taken_over is not None:
        if names != taken_over["plan"]:
            raise RuntimeError(f"{recipe.name} visits other samples than it was to take over")
        result = {name: taken_over[name] for name in result}
    return result | {"epochs": found}


def _stepping(
    stage: Stage, trainer: Trainer, loader: stoker.Loader, targets: torch.Tensor
) -> Callable[[torch.Tensor, float], None]:
    """Return what trains on the batch of these ids, at that share of the training."""

    def step(ids: torch.Tensor, done: float) -> None:
        ids = ids.to(stage.device)
        labels = targets[ids]
        losses, logits, embeddings = trainer.forward(stage.pixels[ids], labels)
        loader.observe(losses, logits=logits, embeddings=embeddings, labels=labels)
        trainer.step((losses * loader.weights).mean(), done)

    return step
