"""Images to train on: CIFAR-10 as JPEG files, or the digits that come with the demo.

Every sample keeps its own encoded bytes, so that caches are filled as in a real training. Labels
may be flipped: a share of them is replaced by another class, drawn once for a seed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import stoker
from stoker.cli._loaders import to_tensor
from stoker.cli.demo import write_digits
from stoker.images import decode_image
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.held import MemorySource
from stoker.source.image_folder import ImageFolderSource


@dataclass(frozen=True)
class Images:
    """A training set behind a Source, and held-out images as tensors."""

    source: Source
    names: tuple[str, ...]
    """Paths of the training images when they were read."""
    targets: NDArray[np.int64]
    """i64[N], the true classes."""
    num_classes: int
    test_images: torch.Tensor
    """u8[M, 3, 32, 32]"""
    test_targets: torch.Tensor
    """i64[M]"""

    def __len__(self) -> int:
        return len(self.source)

    def labels(self, flipped: float, seed: int) -> NDArray[np.int64]:
        """Return i64[N], the classes to train on, a share ``flipped`` of them wrong."""
        rng = np.random.default_rng([seed, 20])
        wrong = rng.permutation(len(self))[: round(flipped * len(self))]
        labels = self.targets.copy()
        labels[wrong] += rng.integers(1, self.num_classes, len(wrong))
        return labels % self.num_classes

    def seen_through(self, root: Path, mountpoint: Path) -> Images:
        """Return the same with each training image left in its file, ``root`` mounted elsewhere."""
        paths = [mountpoint / Path(name).relative_to(root.absolute()) for name in self.names]
        return replace(self, source=FileSource(paths))

    def dataset(self, labels: NDArray[np.int64]) -> stoker.SampleDataset:
        """Return the training set; a sample is (image u8[3, 32, 32], label)."""
        return stoker.SampleDataset(self.source, decode_image, to_tensor, labels)


def load(
    folder: Path | None, samples: int, test_samples: int, *, tests_on_rest: bool = False
) -> Images:
    """Read ``folder/train`` and ``folder/test``; without a folder, write and split the digits.

    ``samples`` and ``test_samples`` bound how many are used, the same number of each class.
    ``tests_on_rest``: the images of ``folder/train`` that are not used are held-out images too.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
            listing = ImageFolderSource(write_digits(Path(own), copies=1))
            held = np.arange(len(listing)) % 6 == 0
            return _images(
                (listing, np.flatnonzero(~held)[:samples]),
                (listing, np.flatnonzero(held)[:test_samples]),
            )
    train, test = ImageFolderSource(folder / "train"), ImageFolderSource(folder / "test")
    used, held = _spread(train, samples), [(test, _spread(test, test_samples))]
    if tests_on_rest:
        held.append((train, np.setdiff1d(np.arange(len(train)), used)))
    return _images((train, used), *held)


def _spread(listing: ImageFolderSource, count: int) -> NDArray[np.int64]:
    """Return ``count`` ids, or all, evenly over the listing, which is sorted by class."""
    return np.unique(np.linspace(0, len(listing) - 1, min(count, len(listing))).astype(np.int64))


def _images(
    train: tuple[ImageFolderSource, NDArray[np.int64]],
    *tests: tuple[ImageFolderSource, NDArray[np.int64]],
) -> Images:
    listing, ids = train
    pictures = [to_tensor(decode_image(data)) for held, at in tests for data in held.read(at)]
    targets = [np.asarray(held.targets, np.int64)[at] for held, at in tests]
    return Images(
        source=MemorySource(listing.read(ids)),
        names=tuple(listing.name(i) for i in ids.tolist()),
        targets=np.asarray(listing.targets, np.int64)[ids],
        num_classes=len(listing.classes),
        test_images=torch.stack(pictures),
        test_targets=torch.from_numpy(np.concatenate(targets)),
    )
