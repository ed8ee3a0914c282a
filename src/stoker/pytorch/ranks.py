"""The ranks of a job as torch.distributed connects them: which this is, and on which node."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from stoker.epoch.ranks import Alone, Collective, Nodes, Ranks, launched_ranks, node_name
from stoker.errors import ConfigError, RanksUnavailable
from stoker.node.runtime_dir import chosen_node


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
    """Return where tensors must lie for the default group's backends: on the CPU if it has one."""
    backends = distributed.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    if "cpu:" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"backends {backends} without an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def current_ranks() -> Ranks:
    """Return what torch.distributed says, else what torchrun or srun set, else a single process."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return launched_ranks()


def from_rank_zero(text: str, ranks: Ranks) -> str | None:
    """Return the text that rank 0 gave; every rank of torch.distributed must call this.

    None when there is no process group of that many ranks to ask. Raises
    :class:`~stoker.errors.RanksUnavailable` when a rank does not answer.
    """
    if ranks.world_size == 1:
        return text
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size() != ranks.world_size:
        return None
    texts = Group().gather(np.frombuffer(text.encode(), np.uint8))
    return texts[0].tobytes().decode()


def find_nodes(ranks: Ranks) -> Nodes | None:
    """Return the nodes of the job; every rank must call this, and all get the same.

    None where all ranks are known to be on one machine, and where no process group has these ranks
    to ask; that warns if there seem to be several machines.

    Raises :class:`~stoker.errors.RanksUnavailable` when a rank does not answer.
    """
    if ranks.world_size == 1 or (_ranks_here() == ranks.world_size and not chosen_node()):
        return None
    is_up = distributed.is_available() and distributed.is_initialized()
    if not is_up or Ranks(distributed.get_rank(), distributed.get_world_size()) != ranks:
        if chosen_node() or _ranks_here() is not None:
            warnings.warn(
                "the nodes of this job cannot agree on which of them keeps which samples, so each "
                "keeps what it reads: call torch.distributed.init_process_group() before the "
                "first iteration, or give the Loader Cache(locality=False)",
                RuntimeWarning,
                stacklevel=6,
            )
        return None
    own = np.frombuffer(node_name().encode(), np.uint8)
    names = [part.tobytes() for part in joined(*ranks).gather(own)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Nodes(tuple(numbers[name] for name in names), ranks.rank)


def _ranks_here() -> int | None:
    """Return how many ranks torchrun or srun started on this machine; None if they did not."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        return 0  # not all of them
    return None
