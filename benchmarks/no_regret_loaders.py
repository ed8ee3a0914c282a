"""The contestants of no_regret.py, each run in a process of its own: seconds and CPU by epoch."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_local import images_of
from feed_process import tree_cpu_seconds
from torch.utils.data import DataLoader, Dataset

from stoker.images import decode_image
from stoker.pytorch import Loader, SampleDataset
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.objects import ObjectSource

warnings.filterwarnings("ignore", "This DataLoader will create")
_HTTP = {"allow_http": True}


@dataclass(frozen=True)
class Task:
    """What both loaders are asked for alike."""

    place: str
    """A folder, or the address of a web server."""
    names: tuple[str, ...]
    batch_size: int
    workers: int
    decodes: bool
    """Whether samples are decoded, or collated as bytes."""
    rate: float = 0.0
    """Samples a second of the accelerator, which sleeps; 0: it takes no time."""
    epochs: int = 3
    cold: str = ""
    """Folder whose files are dropped from the page cache before each epoch, if any."""

    @property
    def is_web(self) -> bool:
        """Whether the samples are objects on a web server."""
        return self.place.startswith("http")

    def open(self) -> Source:
        """Return the samples as Stoker reads them."""
        if self.is_web:
            return ObjectSource(self.place, self.names, storage_options=_HTTP)
        return FileSource([f"{self.place}/{name}" for name in self.names])


def through_torch(task: Task) -> dict[str, Any]:
    """Train through torch's DataLoader, with obstore where the samples are on a web server."""
    clock = Clock(task)
    loader: DataLoader[Any] = DataLoader(
        OneByOne(task),
        task.batch_size,
        shuffle=True,
        num_workers=task.workers,
        collate_fn=images_of if task.decodes else _joined,
        persistent_workers=task.workers > 0,
    )
    return _train(task, loader, clock)


def through_stoker(task: Task) -> dict[str, Any]:
    """Train through Stoker's Loader as it is by default, with a cache of a fifth of the bytes."""
    clock = Clock(task)
    source = task.open()
    with Loader(
        SampleDataset(source, decode=decode_image if task.decodes else bytes),
        task.batch_size,
        num_workers=task.workers,
        collate_fn=images_of if task.decodes else _joined,
        persistent_workers=task.workers > 0,
        epochs=task.epochs,
        cache="20%",
    ) as loader:
        result = _train(task, loader, clock)
        stats = loader.epoch_stats
    source.close()
    counts = {name: [getattr(each, name) for each in stats] for name in ("fetched", "direct")}
    return result | counts


class OneByOne(Dataset[Any]):
    """Reads a sample when it is asked for one, and decodes it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._decode: Callable[[bytes], Any] = decode_image if task.decodes else bytes
        self._store: Any = None

    def __len__(self) -> int:
        return len(self._task.names)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._read(self._task.names[index]))

    def _read(self, name: str) -> bytes:
        if not self._task.is_web:
            return Path(self._task.place, name).read_bytes()
        import obstore
        from obstore.store import HTTPStore

        if self._store is None:
            self._store = HTTPStore.from_url(self._task.place, client_options=_HTTP)
        return obstore.get(self._store, name).bytes().to_bytes()


def _joined(samples: list[bytes]) -> tuple[torch.Tensor, int]:
    """Collate: the samples' bytes one after the other, and how many samples there are."""
    return torch.from_numpy(np.frombuffer(b"".join(samples), np.uint8).copy()), len(samples)


class Clock:
    """Seconds and CPU seconds of the epochs of ``task``, the first from the start on."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._spent: list[tuple[float, float]] = []
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, with a cold page cache if the task wants that."""
        if self._task.cold:
            _drop(self._task.cold)
        self._began = self._now()

    def end(self) -> None:
        """End the epoch."""
        now, began = self._now(), self._began
        self._spent.append((now[0] - began[0], now[1] - began[1]))

    def result(self) -> dict[str, Any]:
        """Return what all epochs took."""
        seconds, cpu = zip(*self._spent, strict=True)
        return {"epoch_s": seconds, "epoch_cpu_s": cpu}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), tree_cpu_seconds()


def _train(task: Task, loader: Iterable[Any], clock: Clock) -> dict[str, Any]:
    """Go through the epochs, of which the first has begun."""
    for number in range(task.epochs):
        if number:
            clock.begin()
        count = 0
        for _, length in loader:
            count += length
            if task.rate:
                time.sleep(length / task.rate)
        clock.end()
        assert count == len(task.names), f"{count} samples in an epoch"
    return clock.result()


def _drop(folder: str) -> None:
    """Drop the files of a folder from the page cache, once they are on the disk."""
    os.sync()
    for entry in os.scandir(folder):
        file = os.open(entry.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
