"""Pixels of a batch to what a network takes, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch

from stoker.errors import ConfigError

_CHANNELS = 3


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
