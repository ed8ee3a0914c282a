"""Which part of an image becomes a sample."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_TRIES = 10


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner."""

    left: float
    top: float
    width: float
    height: float

    def over(self, divisor: int) -> Box:
        """Return the same part of the image at a ``divisor``-th of its size."""
        left, top, width, height = self
        return Box(left / divisor, top / divisor, width / divisor, height / divisor)


def random_box(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Return a box of whole pixels as torchvision's RandomResizedCrop draws it.

    Its share of the area is uniform in ``scale`` and the logarithm of width / height uniform in
    that of ``ratio``. If ten boxes in a row do not fit, it is the largest centred one whose ratio
    is in range. Source: Szegedy and others, Going deeper with convolutions, CVPR 2015.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h)
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return Box((width - w) // 2, (height - h) // 2, w, h)


def centre_box(width: int, height: int, short_side: int, size: int) -> Box:
    """Return what the central ``size`` x ``size`` pixels show once the short side was resized.

    Rounds as torchvision's Resize and CenterCrop do.
    """
    resized_width, resized_height = short_side, short_side
    if width < height:
        resized_height = short_side * height // width
    else:
        resized_width = short_side * width // height
    across, down = width / resized_width, height / resized_height
    left, top = round((resized_width - size) / 2), round((resized_height - size) / 2)
    return Box(left * across, top * down, size * across, size * down)
