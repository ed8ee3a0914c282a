"""What travels with a batch: from the plan to the worker, and with the samples back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError


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
    """Whether the batch is none of training's: its samples are to be scored anew."""
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
class Meta:
    """What a batch of ``n`` samples is made of; give it to ``Loader.observe``.

    Stays on the host: frameworks that move batches to a device leave it as it is.
    """

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

    @property
    def weights(self) -> torch.Tensor:
        """The weight of each sample in the loss, ``float32[n]``, on the CPU.

        A recipe that learns from a part of each batch only sets them in ``Loader.observe``.
        """
        if self.use is not None:
            self.use.weights = True
        if self.plan_weights is None:
            return torch.ones(len(self.ids))
        return torch.from_numpy(self.plan_weights.copy())

    def to(self, *args: Any, **kwargs: Any) -> Meta:
        """Return itself: called by frameworks that move everything in a batch to a device."""
        return self

    def __len__(self) -> int:
        return len(self.ids)


class Envelope(NamedTuple):
    """A batch and what it is made of, on the way from a worker to the main process.

    A tuple, so that torch pins the tensors of ``batch`` and leaves the rest alone.
    """

    batch: Any
    meta: Meta
    failures: tuple[Failure, ...]
    missed: NDArray[np.uint32] | None = None
    """``u32[m]``, samples asked for that were not cached; None where nobody wants to know."""


def attach(batch: Any, meta: Meta) -> Any:
    """Return ``batch`` with ``meta``: under the key "meta", or as its last element.

    A batch that is neither mapping, tuple nor list becomes the tuple ``(batch, meta)``. Raises
    :class:`~stoker.errors.ConfigError` for a batch that has a key "meta" of its own.
    """
    if isinstance(batch, Mapping):
        if "meta" in batch:
            raise ConfigError("the batch has a key 'meta' already: rename it for return_meta=True")
        if not isinstance(batch, MutableMapping):
            return {**batch, "meta": meta}
        batch["meta"] = meta
        return batch
    if isinstance(batch, list):
        return [*batch, meta]
    if isinstance(batch, tuple):
        return (*batch, meta)
    return batch, meta
