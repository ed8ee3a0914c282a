"""Which node of a job keeps which sample, and which rank takes which access."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import generator

NOBODY = -1
"""Home of a sample that no node is to keep."""

DURATION = 64
"""Epochs for which a sample keeps its home. In each epoch one in so many is
drawn again, and samples that move are read from the source once more."""

MAX_NODES = 2**15 - 1


@dataclass(frozen=True)
class Homes:
    """The home of each sample, drawn at random from a seed: one node, which alone keeps it.

    Homes stay for a super-epoch. At the beginning of the next one a share of them is drawn again,
    spread evenly over :data:`DURATION` epochs, so that no two samples are bound to each other for
    the whole training. Where the number of nodes changes, only those homes move that must
    (rendezvous hashing: Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6, 1998).

    With ``capacity`` only as many samples have a home as the nodes' caches hold; the others are
    read where they are needed and kept nowhere. That is right for a cache that never evicts: what
    has a home is then what is cached. Other caches decide by themselves, among all samples whose
    home they are.

    Frozen and pure: safe in any thread or process. Raises :class:`~stoker.errors.ConfigError` for
    a number of samples, of nodes or a capacity that makes no sense, or sizes of another number.
    """

    num_samples: int
    """N: ids are 0 to N-1."""
    num_nodes: int
    """K: nodes are 0 to K-1."""
    seed: int = 0
    """Unsigned 64 bits."""
    sizes: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    """``i64[N]``, bytes of each sample; needed with ``capacity``."""
    capacity: int | None = None
    """Bytes that the cache of a node holds; None: every sample has a home."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"num_samples={self.num_samples} is out of range: give at least 1")
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise ConfigError(f"num_nodes={self.num_nodes} is out of range: give 1 to {MAX_NODES}")
        if self.capacity is None:
            return
        if self.capacity < 0:
            raise ConfigError(f"capacity={self.capacity} is out of range: give 0 bytes or more")
        if self.sizes is None or len(self.sizes) != self.num_samples:
            raise ConfigError(f"capacity needs the sizes of {self.num_samples} samples: give sizes")

    def at(self, epoch: int) -> NDArray[np.int16]:
        """Return i16[N], the home of each sample in the super-epoch that begins with ``epoch``.

        :data:`NOBODY` for samples that no node is to keep. Raises
        :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        generation, age = divmod(epoch, DURATION)
        homes, ranks = self._drawn(generation)
        if age:
            later, their_ranks = self._drawn(generation + 1)
            # Samples take turns, in an order of no meaning.
            moved = generator(self.seed, 0, stream=4).permutation(self.num_samples) % DURATION < age
            homes, ranks = np.where(moved, later, homes), np.where(moved, their_ranks, ranks)
        if self.capacity is not None:
            homes[~self._fits(homes, ranks)] = NOBODY
        return homes

    def _drawn(self, generation: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Return homes, and a random number by which those are chosen that have one."""
        rng = generator(self.seed, generation, stream=3)
        ranks = rng.random(self.num_samples, np.float32)
        homes = np.zeros(self.num_samples, np.int16)
        best = np.full(self.num_samples, -1, np.float32)
        for node in range(self.num_nodes):  # a node's numbers do not depend on how many there are
            bid = rng.random(self.num_samples, np.float32)
            homes[bid > best] = node
            np.maximum(best, bid, out=best)
        return homes, ranks

    def _fits(self, homes: NDArray[np.int16], ranks: NDArray[np.float32]) -> NDArray[np.bool_]:
        assert self.sizes is not None and self.capacity is not None
        fits = np.zeros(self.num_samples, np.bool_)
        for node in range(self.num_nodes):
            own = np.flatnonzero(homes == node)
            own = own[np.argsort(ranks[own], kind="stable")]
            fits[own[np.cumsum(self.sizes[own]) <= self.capacity]] = True
        return fits


def local_order(
    homes: NDArray[np.integer], nodes: NDArray[np.integer], batch: int
) -> NDArray[np.int64]:
    """Return i64[A], the accesses of a plan in an order in which ranks find their own samples.

    ``homes`` [A] is the home of each accessed sample, ``nodes`` [W] the node of each rank, and
    ``batch`` the samples of a rank's batch. Rank r takes every W-th access of the result, from r
    on. Accesses move only within a step, the W x ``batch`` accesses that all ranks take together:
    each step has the samples that the plan has there, so the gradient over all ranks is the same
    as without, and every rank gets as many as before. Within a step as many samples as there is
    room for go to a rank of their home; those left over, and those whose home is none of ``nodes``,
    fill up the other ranks in the order of the plan.

    Pure. Raises :class:`~stoker.errors.ConfigError` for no ranks, negative nodes or an empty batch.
    """
    if not len(nodes) or nodes.min() < 0 or batch < 1:
        raise ConfigError(
            f"nodes={list(nodes)}, batch={batch} are out of range: give the node of each rank, "
            "from 0, and at least 1 sample"
        )
    step = len(nodes) * batch
    full = len(homes) // step * step
    parts = [_steps(homes[:full].reshape(-1, step), nodes)]
    if full < len(homes):
        parts.append(full + _steps(homes[full:].reshape(1, -1), nodes))
    return np.concatenate([part.ravel() for part in parts])


def _steps(homes: NDArray[np.integer], nodes: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return i64[M, G], for M steps of G accesses which of all accesses takes each position."""
    steps, size = homes.shape
    if not steps:
        return np.empty((0, size), np.int64)
    there = nodes[np.arange(size) % len(nodes)]  # the node of each position
    room = np.bincount(there, minlength=int(nodes.max()) + 1)
    order = np.argsort(there, kind="stable")
    first = np.cumsum(room) - room
    # By home, in the order of the plan; then each one's number among those of its home.
    none = len(room)
    known = np.where((homes >= 0) & (homes < none), homes, none)
    sorted_by_home = np.argsort(known, axis=1, kind="stable")
    known = np.take_along_axis(known, sorted_by_home, axis=1)
    index = np.arange(size)
    begins = np.ones_like(known, np.bool_)
    begins[:, 1:] = known[:, 1:] != known[:, :-1]
    number = index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    step, at = np.nonzero(number < np.append(room, 0)[known])
    taken = np.full((steps, size), -1, np.int64)
    local = sorted_by_home[step, at]
    taken[step, order[first[known[step, at]] + number[step, at]]] = local
    left = np.ones((steps, size), np.bool_)
    left[step, local] = False
    taken[taken < 0] = np.nonzero(left)[1]  # as many in each step, in its order
    order = taken + size * np.arange(steps)[:, None]
    return np.asarray(order)
