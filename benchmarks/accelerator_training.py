"""The contestants of accelerator.py's training: all of a network in one process, in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from feed_process import tree_cpu_seconds
from harness import interleave, own_runtime
from no_regret_loaders import OneByOne, Task
from resnet import resnet
from torch.nn import functional
from torch.utils.data import DataLoader

import stoker
from stoker.images import Train
from stoker.pytorch import Normalize

_WARM_UP = 5
_CLASSES = 10


@dataclass(frozen=True)
class Job:
    """What is trained, on what."""

    task: Task
    depth: int
    width: int
    size: int
    """Pixels of a side of the network's images."""
    device: str


Runs = dict[str, list[dict[str, Any]]]
"""What came out of each round, by contestant."""


def compared(jobs: dict[str, Job], rounds: int) -> dict[str, Any]:
    """Return the :data:`Runs` of each job, whose contestants take turns ``rounds`` times."""
    torch.backends.cudnn.benchmark = True
    found: dict[str, Runs] = {place: {who: [] for who in CONTESTANTS} for place in jobs}

    def run(place: str, who: str) -> float:
        before = tree_cpu_seconds()
        with own_runtime():
            result = CONTESTANTS[who](jobs[place])
        visits = len(jobs[place].task.names) * len(result["image_s"])
        result["cpu_s"] = (tree_cpu_seconds() - before) / visits
        found[place][who].append(result)
        rates = ", ".join(f"{1 / each:.0f}" for each in result["image_s"])
        print(f"ResNet-{jobs[place].depth}, {place}, {who}: {rates}/s", file=sys.stderr, flush=True)
        return float(result["image_s"][-1])

    turns = {f"{place}, {who}": partial(run, place, who) for place in jobs for who in CONTESTANTS}
    interleave(turns, rounds, warm_up=False)
    return {"runs": found}


def through_torch(job: Job) -> dict[str, Any]:
    """Train through torch's DataLoader, whose batches are pinned and copied as they are used."""
    loader: DataLoader[Any] = DataLoader(
        OneImage(job),
        job.task.batch_size,
        shuffle=True,
        num_workers=job.task.workers,
        pin_memory=job.device != "cpu",
        drop_last=True,
        persistent_workers=job.task.workers > 0,
    )
    return _train(job, loader)


def through_stoker(job: Job) -> dict[str, Any]:
    """Train through Stoker's Loader, with a cache of a fifth of the bytes."""
    source = job.task.open()
    labels = [index % _CLASSES for index in range(len(job.task.names))]
    with stoker.Loader(
        stoker.SampleDataset(source, transform=Train(job.size), targets=labels),
        job.task.batch_size,
        num_workers=job.task.workers,
        pin_memory=job.device,
        drop_last=True,
        persistent_workers=job.task.workers > 0,
        epochs=job.task.epochs,
        cache="20%",
    ) as loader:
        result = _train(job, loader)
        hits = [each.hit_ratio for each in loader.epoch_stats]
    source.close()
    return result | {"hits": hits}


def from_memory(job: Job) -> dict[str, Any]:
    """Train on one batch that lies on the device: what the network can take."""
    shape = (job.task.batch_size, 3, job.size, job.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=job.device)
    labels = torch.arange(job.task.batch_size, device=job.device) % _CLASSES
    return _train(job, [(images, labels)] * (len(job.task.names) // job.task.batch_size))


CONTESTANTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "one batch on the device": from_memory,
    "torch": through_torch,
    "Stoker": through_stoker,
}


class OneImage(OneByOne):
    """Reads an image when it is asked for one, and decodes and cuts it as Stoker does."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.task)
        self._decode = Train(job.size)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(super().__getitem__(index)), index % _CLASSES


def _train(job: Job, loader: Iterable[Any]) -> dict[str, Any]:
    """Go through the epochs; return their seconds, and of these how long batches were waited for.

    The clock of an epoch runs from the request for its first batch until the device is done.
    """
    step = _stepper(job)
    seconds, waited = [], []
    for _ in range(job.task.epochs):
        began, waiting, count = time.monotonic(), 0.0, 0
        batches: Iterator[Any] = iter(loader)
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            waiting += time.monotonic() - asked
            if batch is None:
                break
            step(*(part.to(job.device, non_blocking=True) for part in batch))
            count += len(batch[0])
        _wait_for(job.device)
        seconds.append((time.monotonic() - began) / count)
        waited.append(waiting / count)
    return {"image_s": seconds, "waited_s": waited}


def _stepper(job: Job) -> Any:
    """Return the training step, run a few times already."""
    torch.manual_seed(0)
    network = resnet(job.depth, job.width)
    model = torch.nn.Sequential(Normalize(dtype=torch.bfloat16), network)
    model.to(job.device, torch.bfloat16, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = functional.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    images = torch.zeros(job.task.batch_size, 3, job.size, job.size, dtype=torch.uint8)
    labels = torch.zeros(job.task.batch_size, dtype=torch.int64)
    for _ in range(_WARM_UP):
        step(images.to(job.device), labels.to(job.device))
    _wait_for(job.device)
    return step


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
