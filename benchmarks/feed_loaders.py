"""What the feed benchmark measures: one loader, some epochs, the times at which they ended.

Every function here runs in a process of its own (:func:`feed_process.run_alone`).
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_servers import Bucket
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.source.base import Source
from stoker.source.files import FileSource
from stoker.source.objects import ObjectSource

warnings.filterwarnings("ignore", "This DataLoader will create")


@dataclass(frozen=True)
class Run:
    """What all loaders are asked for alike."""

    epochs: int = 1
    batch_size: int = 64
    workers: int = 4
    samples_per_second: float = 0.0
    """Of the sleeping accelerator; 0: it takes no time."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of Stoker's Loader."""

    def train(self, batch_length: int) -> None:
        """Compute on a batch, on an accelerator that leaves the processor alone."""
        if self.samples_per_second:
            time.sleep(batch_length / self.samples_per_second)


@dataclass(frozen=True)
class Objects:
    """The objects below a prefix of a bucket."""

    bucket: Bucket
    prefix: str

    def open(self) -> Source:
        """List them."""
        url = f"{self.bucket.url}/{self.prefix}"
        return ObjectSource(url, storage_options=self.bucket.options())


@dataclass(frozen=True)
class Files:
    """Files of this machine."""

    paths: tuple[str, ...]

    def open(self) -> Source:
        """Look at them."""
        return FileSource(list(self.paths))


def tensor_of(samples: Sequence[bytes]) -> tuple[torch.Tensor, int]:
    """Collate: the samples' bytes one after the other, and how many samples there are."""
    return torch.frombuffer(bytearray().join(samples), dtype=torch.uint8), len(samples)


def through_stoker(place: Objects | Files, run: Run) -> dict[str, Any]:
    """Train from ``place`` through Stoker's Loader."""
    source = place.open()
    clock = place.bucket.clock if isinstance(place, Objects) else None
    options = {"collate_fn": tensor_of, "persistent_workers": run.workers > 0} | run.options
    if clock is not None:
        clock.reset()
    with stoker.Loader(
        stoker.SampleDataset(source),
        batch_size=run.batch_size,
        num_workers=run.workers,
        epochs=run.epochs,
        **options,
    ) as loader:
        result = train(run, lambda epoch: loader, clock)
        stats = loader.epoch_stats
    source.close()  # its process would be waited for
    return result | {
        "stall_s": [each.stall_seconds for each in stats],
        "hits": [each.hit_ratio for each in stats],
        "byte_hits": [each.byte_hit_ratio for each in stats],
        "fetched": [each.fetched for each in stats],
        "from_source": [each.bytes_from_source for each in stats],
    }


def through_torch(place: Objects | Files, run: Run) -> dict[str, Any]:
    """Train from ``place`` through torch's DataLoader, one read after another in each worker."""
    dataset = OneByOne(place)
    clock = place.bucket.clock if isinstance(place, Objects) else None
    if clock is not None:
        clock.reset()
    loader = DataLoader(
        dataset,
        run.batch_size,
        shuffle=True,
        num_workers=run.workers,
        collate_fn=tensor_of,
        persistent_workers=True,
    )
    return train(run, lambda epoch: loader, clock)


def train(
    run: Run,
    loader_of: Callable[[int], Iterable[Any]],
    clock: Any = None,
) -> dict[str, Any]:
    """Go through the epochs; the accelerator sleeps.

    Returns when the epochs began and ended, how long batches were waited for in each, and what
    passed the proxy meanwhile.
    """
    began = time.monotonic()
    ends, passed, waits, count = [], [], [], 0
    for epoch in range(run.epochs):
        waits.append(0.0)
        for (_, length), waited in timed(loader_of(epoch)):
            waits[-1] += waited
            count += length
            run.train(length)
        ends.append(time.monotonic())
        passed.append(clock.answered if clock is not None else 0)
    first = clock.first_request if clock is not None else began
    return {
        "count": count,
        "start_s": first - began,
        "epoch_s": np.diff([first, *ends]).tolist(),
        "wait_s": waits,
        "passed": np.diff([0, *passed]).tolist(),
    }


def timed(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch and the seconds it was waited for; the first with the epoch's start."""
    asked = time.monotonic()
    for batch in batches:
        yield batch, time.monotonic() - asked
        asked = time.monotonic()


class InMemory(Dataset[Any]):
    """Encoded samples that cost nothing to read, decoded each time."""

    def __init__(self, samples: list[bytes], decode: Callable[[bytes], Any] = bytes) -> None:
        self._samples, self._decode = samples, decode

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._samples[index])


def from_memory(place: Files, run: Run) -> dict[str, Any]:
    """Train through torch's DataLoader on samples that lie in memory."""
    samples = place.open().read(range(len(place.paths)))
    loader: DataLoader[Any] = DataLoader(
        InMemory(samples),
        run.batch_size,
        shuffle=True,
        num_workers=run.workers,
        collate_fn=tensor_of,
        persistent_workers=True,
    )
    return train(run, lambda epoch: loader)


class OneByOne(Dataset[bytes]):
    """Reads a sample when it is asked for one."""

    def __init__(self, place: Objects | Files) -> None:
        self._place = place
        source = place.open()
        self._names = [source.name(i) for i in range(len(source))]
        source.close()
        self._read: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> bytes:
        if self._read is None:
            self._read = self._opened()
        return self._read(self._names[index])

    def _opened(self) -> Callable[[str], bytes]:
        if isinstance(self._place, Files):
            return lambda name: Path(name).read_bytes()
        import obstore

        store, skip = self._place.bucket.store(), len(self._place.bucket.url) + 1
        return lambda name: bytes(obstore.get(store, name[skip:]).bytes())


def bare_client(place: Objects, ways: int) -> dict[str, Any]:
    """Get every object, ``ways`` at a time, with obstore and nothing else."""
    import obstore

    source = place.open()
    skip = len(place.bucket.url) + 1
    keys = [source.name(i)[skip:] for i in np.random.default_rng(0).permutation(len(source))]
    source.close()
    store = place.bucket.store()

    async def lane(todo: Iterable[str]) -> int:
        total = 0
        for key in todo:
            answer = await obstore.get_async(store, key)
            total += len(await answer.bytes_async())
        return total

    async def all_lanes() -> int:
        todo = iter(keys)
        return sum(await asyncio.gather(*(lane(todo) for _ in range(ways))))

    place.bucket.clock.reset()
    num_bytes = asyncio.run(all_lanes())
    ended = time.monotonic()
    seconds = ended - place.bucket.clock.first_request
    return {"count": len(keys), "bytes": num_bytes, "epoch_s": [seconds]}


def bare_threads(place: Files, ways: int) -> dict[str, Any]:
    """Read every file, ``ways`` threads at a time."""
    order = np.random.default_rng(0).permutation(len(place.paths)).tolist()
    began = time.monotonic()
    with ThreadPoolExecutor(ways) as pool:
        num_bytes = sum(pool.map(lambda i: len(Path(place.paths[i]).read_bytes()), order))
    return {"count": len(order), "bytes": num_bytes, "epoch_s": [time.monotonic() - began]}
