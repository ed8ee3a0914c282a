"""What travels with a batch back from the worker."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.epoch.batch import Failure, ServedBatch
from stoker.errors import ConfigError


@dataclass(frozen=True, eq=False, slots=True)
class Meta(ServedBatch):
    """What a batch of ``n`` samples is made of; give it to ``Loader.observe``.

    Stays on the host: frameworks that move batches to a device leave it as it is.
    """

    @property
    def weights(self) -> torch.Tensor:
        """The weight of each sample in the loss, ``float32[n]``, on the CPU.

        A recipe that learns from a part of each batch only sets them in ``Loader.observe``.
        """
        return weights_of(self)

    def to(self, *args: Any, **kwargs: Any) -> Meta:
        """Return itself: called by frameworks that move everything in a batch to a device."""
        return self


def weights_of(batch: ServedBatch) -> torch.Tensor:
    """Return the weight of each sample in the loss, ``float32[n]``, on the CPU; notes the use."""
    batch.note_weights_used()
    if batch.plan_weights is None:
        return torch.ones(len(batch))
    return torch.from_numpy(batch.plan_weights.copy())


class Envelope(NamedTuple):
    """A batch and what it is made of, on the way from a worker to the main process.

    A tuple, so that torch pins the tensors of ``batch`` and leaves the rest alone.
    """

    batch: Any
    meta: Meta
    failures: tuple[Failure, ...]
    missed: NDArray[np.uint32] | None = None
    """``u32[m]``, samples asked for that were not cached; None where that does not matter."""


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
