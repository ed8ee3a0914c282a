"""Data sets, transforms and small helpers; importable, so that spawned workers find them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stoker.pytorch import ImageFolder, Loader
from stoker.source import MemorySource


def to_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).float()


def with_noise(image: Any) -> torch.Tensor:
    """Draws from all three global generators."""
    noise = torch.rand(1) + np.random.rand() + random.random()  # noqa: NPY002
    return to_tensor(image) + noise


def as_dict(sample: tuple[torch.Tensor, int]) -> dict[str, Any]:
    return {"image": sample[0], "label": sample[1]}


def dict_collate(samples: list[Any]) -> dict[str, Any]:
    images, labels = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": torch.tensor(labels)}


def ids_in(images: torch.Tensor) -> list[int]:
    """The pixels say which image it was."""
    return images[:, 0, 0, 0].int().tolist()


def number_of(raw: bytes) -> int:
    return int(raw[:8])


def numbers(count: int = 100) -> MemorySource:
    """A source whose sample ``i`` is ``i`` in eight digits, and padding of varying length."""
    return MemorySource([f"{i:08}".encode() + b"." * (i % 7) for i in range(count)])


def images(root: Any, transform: Any = to_tensor, **options: Any) -> ImageFolder:
    return ImageFolder(root, transform, **options)


def drain(loader: Loader) -> list[Any]:
    return list(loader)


class Squares(Dataset[Any]):
    """A plain torch data set with transforms, as torchvision's are made."""

    def __init__(self, length: int = 40, transform: Any = None, target_transform: Any = None):
        self.length = length
        self.transform = transform
        self.target_transform = target_transform
        self.reads = 0
        self.classes = ["even", "odd"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        image: Any = np.full((4, 4), index * index, np.int32)
        target: Any = index % 2
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target
