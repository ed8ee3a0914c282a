"""The torch DataLoader inside a Loader: workers, queues and pinning are all torch's own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from stoker.epoch.batch import RequestSampler
from stoker.errors import CapacityError
from stoker.pytorch.batch_server import BatchServer, as_it_is
from stoker.pytorch.hand_over import HandOver

log = logging.getLogger("stoker")

_LOOK = 5.0  # seconds between two looks at who the parent is
_GRACE = 10.0  # seconds


class InnerLoader(DataLoader[Any]):
    """Sends the Requests of ``sampler`` to ``server`` in the workers that ``outer`` asks for."""

    def __init__(
        self, outer: DataLoader[Any], server: BatchServer, sampler: RequestSampler
    ) -> None:
        super().__init__(
            server,
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=_hand_over(outer),
            **_same_as(outer),
            worker_init_fn=BeginWorker(outer.worker_init_fn, _start_method(outer)),
        )
        self.requests = sampler

    def check_worker_number_rationality(self) -> None:
        """Do nothing: the outer loader has warned already."""


class BeginWorker:
    """Does what the user's ``worker_init_fn`` does, if there is one, and ties a worker to training.

    A worker of torch's looks for the end of the process that it finds as its parent: it waits for
    ever where training was killed as the worker began, or where another worker was killed while
    it sent a batch. Here it ends some seconds after training in any case.
    """

    def __init__(self, then: Callable[[int], None] | None, method: str) -> None:
        self._then = then
        self._has_server = method == "forkserver"

    def __call__(self, worker: int) -> None:
        """Begin the worker of that number."""
        if self._then is not None:
            self._then(worker)
        training = multiprocessing.parent_process()
        parent = os.getppid() if training is None or self._has_server else training.pid
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    time.sleep(_GRACE)  # in which torch ends it as usual
    os._exit(1)


def _hand_over(outer: DataLoader[Any]) -> Any:
    """Return what becomes of batches that are made: the collate function."""
    if not outer.num_workers:
        return as_it_is
    try:
        return HandOver(outer.num_workers, outer.prefetch_factor or 1)
    except CapacityError as error:
        log.info("batches of workers travel as torch sends them: %s", error)
        return as_it_is


def _start_method(outer: DataLoader[Any]) -> str:
    context = outer.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def _same_as(outer: DataLoader[Any]) -> dict[str, Any]:
    names = [
        "num_workers",
        "pin_memory",
        "timeout",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "in_order",
    ]
    if outer.pin_memory_device:  # naming it is deprecated
        names.append("pin_memory_device")
    # in_order came with torch 2.6.
    return {name: getattr(outer, name) for name in names if hasattr(outer, name)}
