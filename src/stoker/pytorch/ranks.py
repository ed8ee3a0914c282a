"""Which data-parallel rank this process is, as torch.distributed says, and which node it is on."""

from __future__ import annotations

import os
import warnings

import numpy as np
from torch import distributed

from stoker.cluster.group import Group, joined
from stoker.epoch.ranks import Nodes, Ranks, launched_ranks, node_name
from stoker.node.runtime_dir import chosen_node


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
