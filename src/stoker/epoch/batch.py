"""One batch: as it is asked for, and as it was served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One batch to load, as the main process sends it to a worker."""

    token: int
    """Names the batch within its loader."""
    epoch: int
    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set."""
    positions: NDArray[np.int64]
    """``i64[n]``, places in the epoch's plan of the whole job; augmentation derives from them."""
    weights: NDArray[np.float32] | None
    """``f32[n]``, or None when all are one."""
    keys: NDArray[np.float64] | None
    """``f64[n]``, of the cache policy after these accesses; None when it needs none."""
    spares: NDArray[np.uint32]
    """``u32[k]``, what this rank served before: replacements for samples that fail."""
    first: int = 0
    """Place of the first sample among this rank's accesses of the epoch."""
    stamp: int = 0
    """:attr:`Claims.stamp <stoker.store.claims.Claims.stamp>` of the epoch; 0 without claims."""
    single: bool = False
    """Whether the sample itself is wanted, not a list of one (``batch_size=None``)."""
    is_aside: bool = False
    """Whether the batch is none of training's: its samples are to be rescored."""
    is_bare: bool = False
    """Whether it is to be read past the cache, to measure what that is worth."""


class Failure(NamedTuple):
    """A sample that could not be served."""

    id: int
    name: str
    """What its source calls it: a path, a key."""
    reason: str


class Use:
    """Whether the training loop uses what goes with its batches; one for all of a loader's."""

    weights = False
    """Whether it has asked for weights."""


@dataclass(frozen=True, eq=False, slots=True)
class ServedBatch:
    """What a batch of ``n`` samples is made of, whatever framework trains on it."""

    token: int
    """Names the batch within its loader."""
    epoch: int
    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set, of the samples really served."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    positions: NDArray[np.int64]
    """``i64[n]``, places in the epoch's plan of the whole job."""
    plan_weights: NDArray[np.float32] | None = None
    """``f32[n]``, or None when all are one."""
    use: Use | None = field(default=None, repr=False)
    """Where it is noted that weights were asked for."""

    def note_weights_used(self) -> None:
        """Note that the training loop asked for the weights of a batch."""
        if self.use is not None:
            self.use.weights = True

    def __len__(self) -> int:
        return len(self.ids)
