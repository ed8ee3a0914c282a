"""Losses of the training loop -> scores of the samples that were really served."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.pytorch.losses import per_sample_loss
from stoker.pytorch.meta import Meta
from stoker.scores import Scores


class _Copy(NamedTuple):
    """Losses on their way from an accelerator to the host."""

    ids: NDArray[np.uint32]
    step: int
    losses: torch.Tensor
    done: Any  # an event of that accelerator


class Observer:
    """Keeps which batches are unobserved, and writes losses to scores.

    Used by the training process only, from one thread at a time.
    """

    def __init__(self, scores: Scores) -> None:
        self.non_finite = 0
        """Losses in this run that were NaN or infinite; their samples kept their scores."""
        self.last: Meta | None = None
        """The batch handed out last."""
        self.step = 0
        """Batches observed so far, also in the run that this one goes on from."""
        self._scores = scores
        self._unobserved: set[int] = set()
        self._copies: deque[_Copy] = deque()
        self._device: torch.device | None = None

    @property
    def scores(self) -> Scores:
        """The scores with everything observed so far; waits for copies still under way."""
        self._drain(wait=True)
        return self._scores

    def restore(
        self,
        step: int,
        values: NDArray[np.float64],
        last: NDArray[np.int64],
        seen: NDArray[np.int64],
    ) -> None:
        """Put the scores of a saved state in the place of these; losses on their way are dropped.

        Raises what :meth:`Scores.restore <stoker.scores.Scores.restore>` does.
        """
        self._scores.restore(values, last, seen)
        self._copies.clear()
        self.step = step
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the batches of an epoch that is over or was abandoned."""
        self._unobserved.clear()
        self.last = None

    def hand_out(self, meta: Meta) -> None:
        """Note that the training loop gets this batch."""
        self.last = meta
        self._unobserved.add(meta.token)

    def observe(
        self,
        losses: Any = None,
        *,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        meta: Meta | None = None,
    ) -> None:
        """Store the losses of one batch; see ``Loader.observe``."""
        meta = self._batch(meta)
        values = _per_sample(losses, logits, labels, embeddings, len(meta))
        self._unobserved.discard(meta.token)
        self._device = values.device
        self.step += 1
        self._drain(wait=False)
        step = self.step - 1
        copy = None if values.device.type == "cpu" else _start_copy(meta.ids, step, values)
        if copy is None:
            self._store(meta.ids, values.cpu(), step)
        else:
            self._copies.append(copy)

    def weights(self) -> torch.Tensor:
        """Return the loss weights of the batch that is spoken of; see ``Loader.weights``."""
        if self.last is None:
            raise ConfigError("there is no batch yet whose weights to return: iterate first")
        if len(self._unobserved) > 1:
            raise self._ambiguous("weights")
        weights = self.last.weights
        return weights if self._device is None else weights.to(self._device, non_blocking=True)

    def _batch(self, meta: Meta | None) -> Meta:
        """Return the one batch that an observation speaks of, or raise."""
        if meta is not None:
            if not isinstance(meta, Meta):
                raise ConfigError(
                    f"meta={meta!r} does not come from this loader: pass what return_meta=True "
                    "added to the batch"
                )
            if meta.token not in self._unobserved:
                raise ConfigError(
                    f"the batch of this meta (token {meta.token}) was observed before, or belongs "
                    "to an earlier epoch: observe each batch once, within its epoch"
                )
            return meta
        if len(self._unobserved) > 1:
            raise self._ambiguous("observe()")
        if self.last is None or self.last.token not in self._unobserved:
            raise ConfigError("there is no unobserved batch: call observe() once after each batch")
        return self.last

    def _ambiguous(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} cannot tell which batch is meant: {len(self._unobserved)} are unobserved. "
            "Call observe() after each batch, or use return_meta=True and the meta of the batch"
        )

    def _drain(self, *, wait: bool) -> None:
        """Store the copies that have arrived, or all of them."""
        while self._copies and (wait or self._copies[0].done.query()):
            copy = self._copies.popleft()
            copy.done.synchronize()
            self._store(copy.ids, copy.losses, copy.step)

    def _store(self, ids: NDArray[np.uint32], losses: torch.Tensor, step: int) -> None:
        values = losses.to(torch.float64).numpy()
        finite = np.isfinite(values)
        if not finite.all():
            self._note_non_finite(ids[~finite])
        self._scores.update(ids[finite], values[finite], step)

    def _note_non_finite(self, ids: NDArray[np.uint32]) -> None:
        if self.non_finite == 0:
            warnings.warn(
                f"the losses of {len(ids)} samples are not finite (the first is sample {ids[0]}): "
                "they keep their scores. Further ones are counted in stats.non_finite",
                RuntimeWarning,
                stacklevel=5,
            )
        self.non_finite += len(ids)


def _per_sample(
    losses: Any,
    logits: torch.Tensor | None,
    labels: torch.Tensor | None,
    embeddings: torch.Tensor | None,
    length: int,
) -> torch.Tensor:
    """Return losses ``[length]``, detached, on the device where they are."""
    if losses is None:
        if logits is None or labels is None:
            raise ConfigError("observe() got no losses: give losses, or logits and labels")
        losses = per_sample_loss(logits.detach(), labels)
    values = torch.as_tensor(losses).detach()
    if values.ndim == 0:
        raise ConfigError(
            "observe() got a single number: give one loss per sample, reduction='none'"
        )
    if values.shape != (length,):
        raise ConfigError(
            f"observe() got losses of shape {list(values.shape)} for a batch of {length} samples: "
            "give one loss per sample"
        )
    if embeddings is not None and len(embeddings) != length:
        raise ConfigError(
            f"observe() got {len(embeddings)} embeddings for a batch of {length} samples"
        )
    return values


def _start_copy(ids: NDArray[np.uint32], step: int, losses: torch.Tensor) -> _Copy | None:
    """Start copying losses to pinned memory while their stream goes on computing.

    None for a kind of device that has no events to tell when that is done.
    """
    kind: Any = getattr(torch, losses.device.type, None)
    if not (hasattr(kind, "Event") and hasattr(kind, "current_stream")):
        return None
    target = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
    target.copy_(losses, non_blocking=True)
    done = kind.Event()
    done.record(kind.current_stream(losses.device))
    return _Copy(ids, step, target, done)
