"""From what a training loop shows of a batch to the arrays that scores are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Signal
from stoker.pytorch.losses import gradient_norms, per_sample_loss

Tensors = Mapping[Signal, torch.Tensor]
"""Signals by name, each ``[n, ...]``, detached, wherever they were computed."""


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


_TYPES: dict[Signal, torch.dtype] = {"labels": torch.int64, "embeddings": torch.float32}


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
