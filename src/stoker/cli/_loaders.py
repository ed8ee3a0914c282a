"""The same files through Stoker's Loader and through torch's DataLoader, all else equal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from stoker.epoch.settings import Cache
from stoker.images import decode_image
from stoker.pytorch import ImageFolder, Loader

EpochTimer = Callable[[], float]
"""Runs one epoch without training and returns its seconds per sample."""


def to_float(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Return f32[3, height, width] in 0..1 from u8[height, width, 3], as ToTensor does."""
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)


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


def _seconds_per_sample(loader: DataLoader[Any]) -> float:
    started, count = time.perf_counter(), 0
    for _, targets in loader:
        count += len(targets)
    return (time.perf_counter() - started) / count
