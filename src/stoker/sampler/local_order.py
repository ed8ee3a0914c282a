"""Which rank takes which access of a plan, so that samples are read where they are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError


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
            f"nodes={list(nodes)}, batch={batch} are refused: give the node of each rank, from 0, "
            "and at least 1 sample"
        )
    step = len(nodes) * batch
    full = len(homes) // step * step
    parts = [_steps(homes[:full].reshape(-1, step), nodes)]
    if full < len(homes):
        parts.append(full + _steps(homes[full:].reshape(1, -1), nodes))
    return np.concatenate([part.ravel() for part in parts])


def _steps(homes: NDArray[np.integer], nodes: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return i64[M, G], for M steps of G accesses which of all accesses takes each place."""
    steps, size = homes.shape
    if not steps:
        return np.empty((0, size), np.int64)
    there = nodes[np.arange(size) % len(nodes)]  # the node of each place
    room = np.bincount(there, minlength=int(nodes.max()) + 1)
    places = np.argsort(there, kind="stable")
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
    taken[step, places[first[known[step, at]] + number[step, at]]] = local
    left = np.ones((steps, size), np.bool_)
    left[step, local] = False
    taken[taken < 0] = np.nonzero(left)[1]  # as many in each step, in its order
    order = taken + size * np.arange(steps)[:, None]
    return np.asarray(order)
