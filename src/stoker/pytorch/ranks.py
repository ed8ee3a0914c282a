"""Which data-parallel rank this process is."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from torch import distributed

from stoker.cluster import Group
from stoker.errors import ConfigError


class Ranks(NamedTuple):
    """The place of a process among the data-parallel processes of the job."""

    rank: int
    world_size: int


class LazyRanks:
    """The ranks that the caller gave, or else what holds at the first iteration.

    torch.distributed may come up after a loader is made. Raises ConfigError as
    :func:`checked_ranks` does.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self._fixed = checked_ranks(rank, world_size)

    def now(self) -> Ranks:
        """Return the ranks as far as they can be known now."""
        return self._fixed or current_ranks()

    def fix(self) -> Ranks:
        """Return the ranks, which from now on stay as they are."""
        self._fixed = self.now()
        return self._fixed


def checked_ranks(rank: int | None, world_size: int | None) -> Ranks | None:
    """Return what the caller gave, or None when it is to be found out later.

    Raises :class:`~stoker.errors.ConfigError` unless both or neither are given and
    ``0 <= rank < world_size``.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ConfigError(f"rank={rank!r} and world_size={world_size!r}: give both or neither")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size} is refused: use 1 or more processes")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is out of range: with world_size={world_size} use 0..{world_size - 1}"
        )
    return Ranks(rank, world_size)


def current_ranks() -> Ranks:
    """Return what torch.distributed says, else what torchrun or srun set, else a single process."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    for names in _TORCHRUN, _SLURM:
        if not os.environ.keys() >= set(names):
            continue
        where = {name: os.environ[name] for name in names}
        try:
            given = checked_ranks(*(int(value) for value in where.values()))
        except ValueError as error:
            raise ConfigError(f"the environment says {where}, which is no rank: {error}") from error
        return given or Ranks(0, 1)
    return Ranks(0, 1)


_TORCHRUN = ("RANK", "WORLD_SIZE")
# Of the step that srun started: a batch script has SLURM_NTASKS too, and is one process.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def is_first_on_node(ranks: Ranks) -> bool:
    """Whether this rank does what has to be done once per machine, by torchrun or srun."""
    if "LOCAL_RANK" in os.environ:
        return os.environ["LOCAL_RANK"] == "0"
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks.world_size):
        return os.environ.get("SLURM_LOCALID", "0") == "0"
    return ranks.rank == 0


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
