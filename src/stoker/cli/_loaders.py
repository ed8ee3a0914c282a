"""The data and the loaders that `stoker demo` and `stoker bench` compare."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stoker import recipes
from stoker.cli._options import DATALOADER
from stoker.epoch.settings import Cache
from stoker.epoch.stats import Stats
from stoker.errors import ConfigError
from stoker.images import decode_image
from stoker.importance.base import as_scorer
from stoker.pytorch import ImageFolder, Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.image_folder import ImageFolderSource
from stoker.testing.sources import SlowSource
from stoker.types import parse_bytes

SIDE = 32
"""Width and height in pixels of what the network sees; other images are resized."""

EpochTimer = Callable[[], float]
"""Runs one epoch without training and returns its seconds per sample."""

_TAIL = 0.5  # standard deviation of the latency's logarithm: 1 in 100 takes three times the median
_CONCURRENCY = 16  # requests of a batch that are under way at the same time
_HELD_OUT = 6  # every sixth image measures accuracy and is never trained on

_SHORT = {
    "icache": recipes.icache(warm_up=1),
    "ilfu": recipes.ilfu(warm_up=1),
    "impact": recipes.impact(max_warm_up=2),
}


@dataclass(frozen=True)
class Storage:
    """What the simulated storage delivers."""

    latency: float
    """Median seconds from asking for a sample to having it; the tail is log-normal."""
    iops: float
    """Requests per second, over all workers."""

    def in_front_of(self, source: Source) -> SlowSource:
        """Return ``source`` behind this storage."""
        return SlowSource(
            source, latency=self.latency, tail=_TAIL, iops=self.iops, concurrency=_CONCURRENCY
        )

    def samples_per_second(self, processes: int) -> float:
        """Return the most samples per second for so many processes, one batch each at a time."""
        mean_latency = self.latency * math.exp(_TAIL**2 / 2)
        if mean_latency == 0:
            return self.iops
        return min(self.iops, processes * _CONCURRENCY / mean_latency)


@dataclass(frozen=True)
class DemoData:
    """A training set to be read through a cache, and held-out images in memory."""

    paths: list[str]
    """Files to train on; the index in the list is the sample's id."""
    targets: NDArray[np.int64]
    """i64[N], the class of each training file."""
    num_classes: int
    test_images: torch.Tensor
    """u8[M, 3, 32, 32]"""
    test_targets: torch.Tensor
    """i64[M]"""

    @classmethod
    def load(cls, folder: Path) -> DemoData:
        """List ``folder/<class>/...``, hold out every sixth image, decode those.

        Raises ConfigError for a folder without class folders or with too few images.
        """
        source = ImageFolderSource(folder)
        targets = np.asarray(source.targets, np.int64)
        held = np.arange(len(source)) % _HELD_OUT == 0
        if len(source) < 10 * _HELD_OUT:
            raise ConfigError(
                f"--data {str(folder)!r} holds {len(source)} images: give at least "
                f"{10 * _HELD_OUT}, in one folder per class"
            )
        paths = [source.name(i) for i in range(len(source))]
        held_ids = np.flatnonzero(held)
        images = [to_tensor(decode_image(Path(paths[i]).read_bytes())) for i in held_ids]
        return cls(
            paths=[paths[i] for i in np.flatnonzero(~held)],
            targets=targets[~held],
            num_classes=len(source.classes),
            test_images=torch.stack(images),
            test_targets=torch.from_numpy(targets[held]),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all training files."""
        return int(self.files().sizes.sum())

    def files(self) -> FileSource:
        """Return the training files, without simulated latency."""
        return FileSource(self.paths)

    def dataset(self, source: Source) -> SampleDataset:
        """Return the training set, read from ``source``: :meth:`files`, or storage around it."""
        return SampleDataset(source, decode_image, to_tensor, self.targets)


@dataclass(frozen=True)
class Settings:
    """What is the same in every row of the table."""

    cache: str
    """Size of the cache, as Loader takes it."""
    epochs: int
    batch_size: int
    workers: int
    seed: int = 0

    def share_of(self, data: DemoData) -> float:
        """Return the cache over the bytes of the training set, at most 1; ConfigError if bad."""
        total = data.total_bytes
        return min(1.0, parse_bytes(self.cache, of=total, name="--cache") / total)


def to_tensor(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Return u8[3, 32, 32] from u8[height, width, 3]; bilinear where the size differs."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    if image.shape[1:] == (SIDE, SIDE):
        return image
    resized = torch.nn.functional.interpolate(
        image[None].float(), size=(SIDE, SIDE), mode="bilinear", antialias=True
    )
    return resized[0].round().to(torch.uint8)


def short(name: str) -> Recipe:
    """Return a recipe for a short training: warm-ups are one or two epochs."""
    return _SHORT.get(name) or recipes.get(name)


@contextlib.contextmanager
def open_loader(
    data: DemoData,
    storage: Storage,
    name: str,
    settings: Settings,
    rescore: Callable[[tuple[Tensor, Tensor]], Tensor],
) -> Iterator[Loader | PlainLoader]:
    """Yield the loader of a row: torch's for DATALOADER, else Stoker's with the recipe ``name``."""
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


class PlainLoader:
    """torch's DataLoader as most trainings use it: shuffled, one read a sample, no cache.

    Counts accesses, reads and bytes of the source, and the seconds that the training loop waited,
    as Stoker's Loader does. The other counts stay 0.
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

    def observe(self, losses: Tensor, **signals: Tensor) -> None:
        """Do nothing: there is no cache that could use scores."""

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Do nothing: nothing adapts to the accuracy."""

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
def epoch_timers(
    folder: Path, workers: int, batch_size: int, cache: str = "100%"
) -> Iterator[dict[str, EpochTimer]]:
    """Yield one timer per loader; both shuffle, and keep their workers between epochs.

    The first epoch of each fills the cache and the page cache: discard it. Images must all have
    the same size.
    """
    dataset = ImageFolder(folder, transform=to_float, output="array")
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }
    plain: DataLoader[Any] = DataLoader(PlainFiles(dataset), shuffle=True, **options)
    kept = Cache(cache, stands_aside=False)  # or it would not be measured
    with Loader(dataset, cache=kept, recipe="minio", **options) as cached:
        yield {
            "stoker.Loader": lambda: _seconds_per_sample(cached),
            "torch DataLoader": lambda: _seconds_per_sample(plain),
        }


class PlainFiles(Dataset[Any]):
    """What people write by hand: open, read, decode and transform one sample per call."""

    def __init__(self, folder: ImageFolder) -> None:
        # Arrays, not lists: with lists, reference counts would copy the pages of every worker.
        self._paths = np.array([folder.source.name(i) for i in range(len(folder))])
        self._targets = folder.targets

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = Path(self._paths[index]).read_bytes()
        return to_float(decode_image(data)), int(self._targets[index])


def to_float(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Return f32[3, height, width] in 0..1 from u8[height, width, 3], as ToTensor does."""
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)


def _seconds_per_sample(loader: DataLoader[Any]) -> float:
    started, count = time.perf_counter(), 0
    for _, targets in loader:
        count += len(targets)
    return (time.perf_counter() - started) / count
