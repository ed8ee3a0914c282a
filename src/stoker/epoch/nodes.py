"""Which machine each rank of the job runs on, and which samples belong there."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.node.runtime_dir import chosen_node
from stoker.sampler.homes import Homes, local_order


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
