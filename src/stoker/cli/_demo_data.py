"""The demo's settings, simulated storage, and data: class folders split for training and test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.images import decode_image
from stoker.pytorch import SampleDataset
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.image_folder import ImageFolderSource
from stoker.testing.sources import SlowSource
from stoker.types import parse_bytes

SIDE = 32
"""Width and height in pixels of what the network sees; other images are resized."""
_TAIL = 0.5  # standard deviation of the latency's logarithm: 1 in 100 takes three times the median
_CONCURRENCY = 16  # requests of a batch that are under way at the same time
_HELD_OUT = 6  # every sixth image measures accuracy and is never trained on


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
