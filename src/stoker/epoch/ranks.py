"""Which data-parallel rank this process is, and which ranks share a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.node.runtime_dir import chosen_node
from stoker.sampler.homes import Homes, local_order


class Ranks(NamedTuple):
    """The place of a process among the data-parallel processes of the job."""

    rank: int
    world_size: int


Agree = Callable[[str, Ranks], str | None]
"""Returns the text that rank 0 gave, on all ranks; None where they cannot ask each other."""


def alone(text: str, ranks: Ranks) -> str | None:
    """Return the text of a single rank; None for several: an :data:`Agree` without a network."""
    return text if ranks.world_size == 1 else None


class LazyRanks:
    """The ranks that the caller gave, or else what ``find`` returns at the first iteration.

    A framework may start its processes' communication after a loader is made. Raises ConfigError
    as :func:`checked_ranks` does.
    """

    def __init__(self, rank: int | None, world_size: int | None, find: Callable[[], Ranks]) -> None:
        self._fixed = checked_ranks(rank, world_size)
        self._find = find

    def now(self) -> Ranks:
        """Return the ranks as far as they can be known now."""
        return self._fixed or self._find()

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
        raise ConfigError(f"world_size={world_size}: use 1 or more processes")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is out of range: with world_size={world_size} use 0..{world_size - 1}"
        )
    return Ranks(rank, world_size)


def launched_ranks() -> Ranks:
    """Return what torchrun or srun set in the environment, else a single process.

    Raises :class:`~stoker.errors.ConfigError` for values that are no rank.
    """
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


def ranks_on_node(ranks: Ranks) -> int:
    """Return how many ranks of the job this machine has, as far as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, numbered in the order of their first ranks."""

    of_rank: tuple[int, ...]
    """The node of each rank."""
    rank: int
    """This process's own."""

    @property
    def own(self) -> int:
        """The node of this process."""
        return self.of_rank[self.rank]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.of_rank) + 1

    @property
    def is_first(self) -> bool:
        """Whether this rank does what has to be done once per node."""
        return self.of_rank.index(self.own) == self.rank

    @property
    def ranks_here(self) -> int:
        """How many ranks this node has."""
        return self.of_rank.count(self.own)

    def elsewhere(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the accesses ``i64[A]``, as ranks divide them, that other nodes take."""
        takers = np.array(self.of_rank)[np.arange(len(order)) % len(self.of_rank)]
        return np.asarray(order[takers != self.own])


def node_name() -> str:
    """Return what tells this machine from others: ``STOKER_NODE``, else host and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.is_file() else ""
    return chosen_node() or f"{socket.gethostname()} {booted}"


class Locality:
    """The homes of samples on the nodes of a job, and who takes which access because of them.

    Pure but for a memory of the latest results; used by the training process only.
    """

    def __init__(self, nodes: Nodes, homes: Homes, batch: int) -> None:
        self.nodes = nodes
        self._homes = homes
        self._batch = batch
        self._ranks = np.array(nodes.of_rank)
        self._at = lru_cache(maxsize=2)(homes.at)

    def are_here(self, epoch: int) -> NDArray[np.bool_]:
        """Return bool[N], the samples to be kept on this node in the super-epoch from ``epoch``."""
        return np.asarray(self._at(epoch) == self.nodes.own)

    def order(self, ids: NDArray[np.uint32], epoch: int) -> NDArray[np.int64]:
        """Return i64[A], the accesses ``ids`` u32[A] in the order that ranks divide."""
        return local_order(self._at(epoch)[ids], self._ranks, self._batch)
