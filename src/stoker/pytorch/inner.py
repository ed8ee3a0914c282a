"""The torch DataLoader inside a Loader: workers, queues and pinning are all torch's own."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

from stoker.errors import CapacityError
from stoker.pytorch.batch_server import BatchServer, as_it_is
from stoker.pytorch.hand_over import HandOver
from stoker.pytorch.requests import RequestSampler

log = logging.getLogger("stoker")


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
        )
        self.requests = sampler

    def check_worker_number_rationality(self) -> None:
        """Do nothing: the outer loader has warned already."""


def _hand_over(outer: DataLoader[Any]) -> Any:
    """Return what becomes of batches that are made: the collate function."""
    if not outer.num_workers:
        return as_it_is
    try:
        return HandOver(outer.num_workers, outer.prefetch_factor or 1)
    except CapacityError as error:
        log.info("batches of workers travel as torch sends them: %s", error)
        return as_it_is


def _same_as(outer: DataLoader[Any]) -> dict[str, Any]:
    names = [
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
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
