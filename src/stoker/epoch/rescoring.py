"""Samples that are scored again by a forward pass before a plan is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.planner import BatchSpec
from stoker.epoch.ranks import Ranks
from stoker.store.tier import Keys


def rescoring_specs(
    ids: NDArray[np.uint32],
    ranks: Ranks,
    batch_size: int | None,
    keys: Callable[[NDArray[np.uint32]], Keys],
) -> Iterator[BatchSpec]:
    """Yield the batches of one rank's part of ``ids`` ``u32[m]``.

    Parts are filled up to equal lengths, since the forward pass of a model that is wrapped for
    several ranks may talk to the others. Augmentation is that of the places ``ids``; ``keys`` are
    those of the cache policy.
    """
    size = batch_size or 1
    own = np.resize(ids, -(-len(ids) // ranks.world_size) * ranks.world_size)
    own = np.ascontiguousarray(own[ranks.rank :: ranks.world_size])
    for begin in range(0, len(own), size):
        part = own[begin : begin + size]
        places = part.astype(np.int64)
        yield BatchSpec(part, places, keys=keys(part), first=begin, single=batch_size is None)
