"""The ranks of a job, connected by torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from stoker.cluster.collective import Alone, Collective
from stoker.errors import ConfigError, RanksUnavailable


class Group:
    """The default process group of torch.distributed, whatever its backend.

    With a backend that moves only an accelerator's tensors, like nccl, bytes go through the
    current device. Used by one thread.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays ``[n]`` that the ranks gave, by rank; of one dtype, of any lengths.

        Two collectives: the lengths, then bytes, filled up to the longest. Raises
        :class:`~stoker.errors.RanksUnavailable` when a rank is gone, or does not answer within the
        time-out that the process group was made with.
        """
        try:
            return self._gather(rows)
        except RuntimeError as error:
            raise RanksUnavailable(
                f"rank {self.rank} of {self.world_size} cannot exchange with the others: "
                f"{str(error).splitlines()[0]}. Start all ranks again, from their latest state"
            ) from error

    def _gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        device = _device()
        own = torch.tensor([len(rows)], dtype=torch.int64, device=device)
        lengths = [torch.empty_like(own) for _ in range(self.world_size)]
        distributed.all_gather(lengths, own)
        counts = [int(length) for length in lengths]
        size = max(counts) * rows.itemsize
        if size == 0:
            return [rows[:0] for _ in counts]
        sent = np.zeros(size, np.uint8)
        sent[: rows.nbytes] = np.ascontiguousarray(rows).view(np.uint8)
        received = [torch.empty(size, dtype=torch.uint8, device=device) for _ in counts]
        distributed.all_gather(received, torch.from_numpy(sent).to(device))
        return [
            part.cpu().numpy()[: count * rows.itemsize].view(rows.dtype)
            for part, count in zip(received, counts, strict=True)
        ]


def joined(rank: int, world_size: int) -> Collective:
    """Return the ranks of a job as this process can reach them.

    Raises :class:`~stoker.errors.ConfigError` when there is no process group of these ranks.
    """
    if world_size == 1:
        return Alone()
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            f"world_size={world_size} ranks have to agree on epochs and scores and cannot: call "
            "torch.distributed.init_process_group() before the first iteration"
        )
    group = Group()
    if (group.rank, group.world_size) != (rank, world_size):
        raise ConfigError(
            f"rank={rank}, world_size={world_size} are not those of torch.distributed, rank "
            f"{group.rank} of {group.world_size}: scores are exchanged between all of its "
            "processes, so give each of them its own part of the data"
        )
    return group


def _device() -> torch.device:
    """Return where tensors must lie for the default group's backend."""
    backend = str(distributed.get_backend())
    if "gloo" in backend or "mpi" in backend or "cpu:" in backend:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"backend {backend} without an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
