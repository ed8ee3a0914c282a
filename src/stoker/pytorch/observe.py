"""What the training loop shows in tensors, on the way to those who score: losses, norms, copies."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch.nn import functional

from stoker.epoch.batch import ServedBatch
from stoker.epoch.observer import Arrived, Observer
from stoker.errors import ConfigError
from stoker.importance.base import Signal
from stoker.pytorch.knn import search_on
from stoker.pytorch.meta import weights_of

Tensors = Mapping[Signal, torch.Tensor]
"""Signals by name, each ``[n, ...]``, detached, wherever they were computed."""
_TYPES: dict[Signal, torch.dtype] = {"labels": torch.int64, "embeddings": torch.float32}


class TensorObserver:
    """Computes the signals of a batch where its tensors lie, and copies them to an Observer.

    Used by the training process only, from one thread at a time.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._dimension: int | None = None
        self._device: torch.device | None = None

    def observe(self, shown: Shown, meta: ServedBatch | None = None) -> None:
        """Take what the training loop shows of one batch; see ``Loader.observe``."""
        began = time.perf_counter()
        batch = self._observer.batch(meta)
        signals = shown.signals(self._observer.scorer.needs, len(batch))
        self._check_dimension(signals.get("embeddings"))
        self._device = next(iter(signals.values())).device
        copy = start_copy(signals)
        self._observer.add(batch, Arrived(copy.arrays()) if copy.has_arrived else copy, began)

    def rescore(self, meta: ServedBatch, losses: Any) -> None:
        """Have a batch that is none of training's scored by its losses ``[n]``."""
        signals = start_copy(Shown(losses).signals(frozenset(), len(meta))).arrays()
        self._observer.rescore(meta.ids, meta.epoch, signals)

    def weights(self) -> torch.Tensor:
        """Return the loss weights of the batch that is spoken of; see ``Loader.weights``."""
        weights = weights_of(self._observer.weighed())
        return weights if self._device is None else weights.to(self._device, non_blocking=True)

    def _check_dimension(self, embeddings: torch.Tensor | None) -> None:
        if embeddings is None:
            return
        dimension = embeddings.shape[1]
        if self._dimension is None:
            self._dimension = dimension
            search_on(embeddings.device, self._observer.scorer)
        if dimension != self._dimension:
            raise ConfigError(
                f"observe() got embeddings of dimension {dimension}, and before of "
                f"{self._dimension}: give the output of one layer throughout"
            )


def per_sample_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    shift: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each sample, ``float[batch]``, differentiable.

    ``logits`` is ``[batch, ..., classes]`` and ``labels`` ``int[batch, ...]``: classification
    without inner dimensions, token models with one, ``[batch, time]``. Positions labelled
    ``ignore_index`` do not count; a sample's loss is the mean over its other positions, and NaN
    when it has none (``Loader.observe`` then keeps its old score). ``shift=True`` compares
    position ``t`` with label ``t + 1``, for causal language models whose labels are their inputs.

    Raises :class:`~stoker.errors.ConfigError` for shapes that do not fit. Safe in any thread.
    """
    _check_shapes(logits, labels)
    if shift:
        if labels.ndim < 2:
            raise ConfigError(f"shift=True needs labels [batch, time], not {list(labels.shape)}")
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = functional.cross_entropy(
        _single(logits).reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    )
    rows = _rows(labels)
    counted = (labels != ignore_index).reshape(rows).sum(dim=1)
    # 0 / 0 is NaN on purpose: a sample without a labelled position has no loss.
    return flat.reshape(rows).sum(dim=1) / counted


@torch.no_grad()
def gradient_norms(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the norm of the gradient of each sample's loss by its logits, ``float[batch]``.

    Shapes, errors and samples without a labelled position as for :func:`per_sample_loss`. With
    p = softmax(logits): ||p - onehot(label)|| for classification (Katharopoulos and Fleuret,
    ICML 2018, Eq. 16-20, the factor of the last layer), and of the mean over positions otherwise.
    Computed where the logits are.
    """
    _check_shapes(logits, labels)
    shares = _single(logits).softmax(dim=-1)
    counts = labels != ignore_index
    own = shares.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    # ||p - y||^2 without the one-hot vectors; rounding may take it below 0.
    squares = ((shares * shares).sum(dim=-1) - 2 * own + 1).clamp(min=0) * counts
    rows = _rows(labels)
    return squares.reshape(rows).sum(dim=1).sqrt() / counts.reshape(rows).sum(dim=1)


def _check_shapes(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape or labels.ndim == 0:
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit labels {list(labels.shape)}: give logits "
            "[batch, ..., classes] and labels [batch, ...]"
        )


def _single(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _rows(labels: torch.Tensor) -> tuple[int, int]:
    return labels.shape[0], math.prod(labels.shape[1:])


class Shown(NamedTuple):
    """What the training loop gave for one batch."""

    losses: Any = None
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None

    def signals(self, needs: frozenset[Signal], length: int) -> dict[Signal, torch.Tensor]:
        """Return the losses and the needed signals of ``length`` samples, as far as they are there.

        What has to be computed is computed where its input lies; nothing is moved. Raises
        :class:`~stoker.errors.ConfigError` for shapes that do not fit, and if there is nothing.
        """
        found: dict[Signal, torch.Tensor] = {}
        if self.embeddings is not None:
            vectors = _embeddings(self.embeddings, length)
            if "embeddings" in needs:
                found["embeddings"] = vectors
        if self.losses is not None:
            found["losses"] = _losses(self.losses, length)
        elif self.logits is not None and self.labels is not None:
            found["losses"] = _losses(per_sample_loss(self.logits.detach(), self.labels), length)
        elif "embeddings" not in found:
            raise ConfigError("observe() got no losses: give losses, or logits and labels")
        if "gradient_norms" in needs and self.logits is not None and self.labels is not None:
            norms = gradient_norms(self.logits.detach(), self.labels)
            found["gradient_norms"] = _losses(norms, length)
        if "labels" in needs and self.labels is not None:
            found["labels"] = _labels(self.labels, length)
        return found


class Copy(NamedTuple):
    """Signals on their way to the host."""

    tensors: dict[Signal, torch.Tensor]
    """On the host; their values are there when all of ``done`` are."""
    done: list[Any]
    """Events of the accelerators that they come from; none if they are there."""

    @property
    def has_arrived(self) -> bool:
        """Whether the values are there."""
        return all(event.query() for event in self.done)

    def arrays(self) -> dict[Signal, NDArray[Any]]:
        """Return the signals in the types of an Observation; waits for them."""
        for event in self.done:
            event.synchronize()
        return {name: _array(name, tensor) for name, tensor in self.tensors.items()}


def start_copy(tensors: Tensors) -> Copy:
    """Start copying to pinned memory while the streams that compute ``tensors`` continue.

    A kind of device that has no events to tell when that is done is waited for.
    """
    copied: dict[Signal, torch.Tensor] = {}
    done: dict[torch.device, Any] = {}
    for name, tensor in tensors.items():
        device = tensor.device
        kind: Any = getattr(torch, device.type, None)
        if device.type == "cpu" or not (hasattr(kind, "Event") and hasattr(kind, "current_stream")):
            copied[name] = tensor.cpu()
            continue
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copied[name] = target.copy_(tensor, non_blocking=True)
        done[device] = kind.Event()
    for device, event in done.items():
        event.record(getattr(torch, device.type).current_stream(device))
    return Copy(copied, list(done.values()))


def _array(name: Signal, tensor: torch.Tensor) -> NDArray[Any]:
    # A copy in any case: the training loop may write to its tensors, and observations are kept.
    array: NDArray[Any] = tensor.to(_TYPES.get(name, torch.float64), copy=True).numpy()
    return array


def _losses(losses: Any, length: int) -> torch.Tensor:
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
    return values


def _embeddings(embeddings: torch.Tensor, length: int) -> torch.Tensor:
    vectors = torch.as_tensor(embeddings).detach()
    if len(vectors) != length:
        raise ConfigError(
            f"observe() got {len(vectors)} embeddings for a batch of {length} samples"
        )
    if vectors.ndim != 2:
        raise ConfigError(
            f"observe() got embeddings of shape {list(vectors.shape)}: give one vector per sample, "
            "[batch, dimension]"
        )
    return vectors


def _labels(labels: torch.Tensor, length: int) -> torch.Tensor:
    classes = torch.as_tensor(labels).detach()
    if classes.shape != (length,) or classes.is_floating_point():
        raise ConfigError(
            f"observe() got labels of shape {list(classes.shape)}, {classes.dtype}, for a batch of "
            f"{length} samples: this recipe needs one class number per sample"
        )
    return classes
