"""The way of a batch to an accelerator: pinned memory, copies one batch ahead, pixels as floats.

Pinned memory is torch's own. Torch knows of each copy that starts in a tensor of it, and does not
give the memory out again while one is under way; of memory that others pinned it knows nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from stoker.epoch.cached import BatchMemory
from stoker.errors import ConfigError
from stoker.pytorch.hand_over import Envelope

Device = str | torch.device

_CHANNELS = 3


class Lane(Protocol):
    """A queue of copies to a device, beside the one in which training computes. For one thread."""

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device, where its values arrive later."""

    def mark(self) -> Any:
        """Return what tells when the copies so far are done."""

    def hand_over(self, mark: Any, tensors: list[torch.Tensor]) -> None:
        """Have what training queues from now on wait for ``mark``, and own ``tensors``."""


class AcceleratorLane:
    """A stream of its own on ``device``; ``kind`` is the module of torch for such devices."""

    def __init__(self, device: torch.device, kind: Any = None) -> None:
        self._device = device
        self._kind = getattr(torch, device.type) if kind is None else kind
        self._stream = self._kind.Stream(device)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Lane`."""
        with self._kind.stream(self._stream):
            return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        """See :class:`Lane`."""
        event = self._kind.Event()
        event.record(self._stream)
        return event

    def hand_over(self, mark: Any, tensors: list[torch.Tensor]) -> None:
        """See :class:`Lane`."""
        training = self._kind.current_stream(self._device)
        training.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(training)  # else its memory is free when this lane is done


class Ahead:
    """Yields ``envelopes`` with their batches on a device, to which the next is on its way.

    Tensors move that are in tuples, lists and mutable mappings, and PackedSequences. An error comes
    where its batch would. For one thread.
    """

    def __init__(self, envelopes: Iterator[Envelope], lane: Lane) -> None:
        self._envelopes, self._lane = envelopes, lane
        self._coming: _Copied | Exception | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Envelope:
        coming = self._start() if self._coming is None else self._coming
        if isinstance(coming, Exception):
            self._coming = None
            raise coming
        self._coming = self._start()
        return coming.arrived()

    def _start(self) -> _Copied | Exception:
        """Start copying a batch; an error is kept for its turn."""
        try:
            return _Copied(next(self._envelopes), self._lane)
        except Exception as error:
            return error


class _Copied:
    """An envelope whose batch is on its way."""

    def __init__(self, envelope: Envelope, lane: Lane) -> None:
        self._lane = lane
        self._tensors: list[torch.Tensor] = []
        self._envelope = envelope._replace(batch=self._moved(envelope.batch))
        self._mark = lane.mark()

    def arrived(self) -> Envelope:
        """Return the envelope for training to use."""
        self._lane.hand_over(self._mark, self._tensors)
        return self._envelope

    def _moved(self, part: Any) -> Any:
        """Return a part of a batch with its tensors on the device; other types stay as they are."""
        if isinstance(part, torch.Tensor):
            self._tensors.append(self._lane.copied(part))
            return self._tensors[-1]
        if isinstance(part, PackedSequence):  # whose batch sizes belong on the host
            indices = self._moved(part.sorted_indices), self._moved(part.unsorted_indices)
            return PackedSequence(self._moved(part.data), part.batch_sizes, *indices)
        if isinstance(part, MutableMapping):
            moved = copy.copy(part)
            moved.update({key: self._moved(value) for key, value in part.items()})
            return moved
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(self._moved, part))
        if isinstance(part, tuple | list):
            return type(part)(map(self._moved, part))
        return part


def on_device(envelopes: Iterator[Envelope], device: torch.device | None) -> Iterator[Envelope]:
    """Return ``envelopes`` with their batches on ``device``, as they are for None and the CPU."""
    return Ahead(envelopes, AcceleratorLane(device)) if is_accelerator(device) else envelopes


def is_accelerator(device: torch.device | None) -> TypeGuard[torch.device]:
    """Whether batches are copied to it."""
    return device is not None and device.type != "cpu"


def checked_target(pin_memory: bool | Device) -> torch.device | None:
    """Return the device that is named, None if none is; ConfigError if it has no streams here."""
    if isinstance(pin_memory, bool):
        return None
    try:
        found = torch.device(pin_memory)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"pin_memory={pin_memory!r}: give True, False or a device, as 'cuda'"
        ) from error
    kind: Any = getattr(torch, found.type, None)
    if found.type == "cpu":
        return found
    if not (hasattr(kind, "Stream") and hasattr(kind, "current_stream")):
        raise ConfigError(
            f"pin_memory={pin_memory!r}: such a device has no streams to copy in; move batches "
            "there yourself"
        )
    count = kind.device_count() if kind.is_available() else 0
    if (found.index or 0) >= count:
        raise ConfigError(
            f"pin_memory={pin_memory!r}: torch finds {count} devices of {found.type!r}"
        )
    return found


def pins(outer: DataLoader[Any]) -> bool:
    """Whether the batches of ``outer`` are pinned: asked for, and there is what needs it."""
    return outer.pin_memory and torch.cuda.is_available()


class PinnedMemory(BatchMemory):
    """Pinned memory for the images of batches."""

    def pixels(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return new memory; it belongs to the tensor that is its ``base``."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()


def pinned_copy(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``part`` u8[n] in pinned memory."""
    target = PinnedMemory().pixels(part.shape)
    target[:] = part
    return target


class Normalize(torch.nn.Module):
    """Makes ``(pixels / 255 - mean) / std`` of uint8 images, wherever they lie.

    Takes ``uint8[n, 3, h, w]``, or ``uint8[n, h, w, 3]`` with ``layout="hwc"``, as
    :mod:`stoker.images` gives them; returns ``dtype[n, 3, h, w]`` in channels_last memory, which
    convolutions prefer. A batch travels to the device as bytes, half of what bfloat16 takes.
    Computes in float32, even if the model was cast with ``model.to(torch.bfloat16)``. ``mean`` and
    ``std``, of the three channels, are ImageNet's by default.

    Raises :class:`~stoker.errors.ConfigError` for other values, and other images.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        dtype: torch.dtype = torch.float32,
        *,
        layout: Literal["chw", "hwc"] = "chw",
    ) -> None:
        super().__init__()
        if len(mean) != _CHANNELS or len(std) != _CHANNELS or not min(std) > 0:
            raise ConfigError(f"mean={mean}, std={std}: give three of each, std above 0")
        if not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype}: give a floating point type")
        if layout not in ("chw", "hwc"):
            raise ConfigError(f"layout={layout!r} is not known: use 'chw' or 'hwc'")
        self.dtype, self.layout = dtype, layout
        spread = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
        middle = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
        self._constants = (1 / (255 * spread)).float(), (-middle / spread).float()
        for name, constant in zip(("scale", "shift"), self._constants, strict=True):
            self.register_buffer(name, constant, persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the normalized images."""
        planes = pixels.permute(0, 3, 1, 2) if self.layout == "hwc" else pixels
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or planes.shape[1] != _CHANNELS:
            raise ConfigError(
                f"images of shape {list(pixels.shape)} and type {pixels.dtype}: this takes uint8, "
                f"n of {self.layout!r} with {_CHANNELS} channels"
            )
        values = planes.to(torch.float32, memory_format=torch.channels_last)
        return torch.addcmul(self.shift, values, self.scale).to(self.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Casting a module rounds its buffers: take exact ones to where they are now.
        self.scale, self.shift = (each.to(self.scale.device) for each in self._constants)
        return self

    def extra_repr(self) -> str:
        """Return what the module's text shows."""
        return f"dtype={self.dtype}, layout={self.layout!r}"
