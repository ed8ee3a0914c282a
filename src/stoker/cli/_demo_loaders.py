"""The loaders that the demo compares: Stoker's with a recipe, and torch's own without a cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stoker import recipes
from stoker.cli._choice import DATALOADER
from stoker.cli._demo_data import DemoData, Settings, Storage
from stoker.epoch.stats import Stats
from stoker.importance.base import as_scorer
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe

_SHORT = {"icache": {"warm_up": 1}, "ilfu": {"warm_up": 1}, "impact": {"max_warm_up": 2}}


class BatchLoader(Protocol):
    """What the training loop takes of a loader: a part of :class:`~stoker.pytorch.Loader`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def observe(
        self,
        losses: Any = None,
        *,
        logits: Tensor | None = None,
        embeddings: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Have the samples of the latest batch scored."""

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Mark the end of an epoch."""

    @property
    def weights(self) -> Tensor:
        """Loss weights of the latest batch, f32[n] or f32[] for all."""

    @property
    def stats(self) -> Stats:
        """What was counted so far."""


class PlainLoader:
    """torch's DataLoader as most trainings use it: shuffled, one read a sample, no cache.

    Counts what Stoker's Loader counts, as far as it exists here: accesses, reads and bytes of
    the source, and the seconds that the training loop waited. The other counts stay 0.
    """

    def __init__(self, data: DemoData, storage: Storage, settings: Settings) -> None:
        self._source = storage.in_front_of(data.files())
        self._loader: DataLoader[Any] = DataLoader(
            _OneByOne(data.dataset(self._source)),
            batch_size=settings.batch_size,
            shuffle=True,
            num_workers=settings.workers,
            persistent_workers=settings.workers > 0,
            generator=torch.Generator().manual_seed(settings.seed),
        )
        self._stall_seconds = 0.0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self._stall_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def observe(
        self,
        losses: Any = None,
        *,
        logits: Tensor | None = None,
        embeddings: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Do nothing: there is no cache that could follow scores."""

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Do nothing, as nothing adapts to the accuracy."""

    @property
    def weights(self) -> Tensor:
        """One, f32[]: samples are drawn uniformly."""
        return torch.ones(())

    @property
    def stats(self) -> Stats:
        """What was read so far, over all workers, and how long the training loop waited."""
        reads = int(self._source.reads.sum())
        return Stats(
            accesses=reads,
            fetched=reads,
            bytes_from_source=int(self._source.reads @ self._source.sizes.astype(np.int64)),
            stall_seconds=self._stall_seconds,
        )


class _OneByOne(Dataset[Any]):
    """A data set without ``__getitems__``, so that torch asks for one sample at a time."""

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


@contextlib.contextmanager
def open_loader(
    data: DemoData,
    storage: Storage,
    name: str,
    settings: Settings,
    rescore: Callable[[tuple[Tensor, Tensor]], Tensor],
) -> Iterator[BatchLoader]:
    """Give the loader of a row: torch's for DATALOADER, else Stoker's with the recipe ``name``."""
    if name == DATALOADER:
        yield PlainLoader(data, storage, settings)
        return
    recipe = short(name)
    is_rescored = as_scorer(recipe.scorer(len(data.paths))).rescores
    with Loader(
        data.dataset(storage.in_front_of(data.files())),
        batch_size=settings.batch_size,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        cache=settings.cache,
        recipe=recipe,
        epochs=settings.epochs,
        seed=settings.seed,
        rescore=rescore if is_rescored else None,
    ) as loader:
        yield loader


def short(name: str) -> Recipe:
    """Return a recipe for so short a training: warm-ups are one or two epochs."""
    return recipes.get(name, **_SHORT.get(name, {}))


def predicted_hit_ratio(name: str, settings: Settings, data: DemoData) -> float | None:
    """Return the byte hit ratio that theory gives from the second epoch on; None without one."""
    if name == DATALOADER:
        return None
    return short(name).predicted_hit_ratio(settings.share_of(data))
