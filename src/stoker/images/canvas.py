"""The memory of a batch of images, and whose random numbers fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.images.transforms import ImageTransform


class Canvas:
    """``n`` places for what ``transform`` makes of images; each has random numbers of its own.

    ``seeds`` are the ``n`` seeds of the places, from 0 to 2**64 - 1. Several threads may fill
    different places.
    """

    def __init__(self, transform: ImageTransform, seeds: Sequence[int]) -> None:
        self._transform, self._seeds = transform, seeds
        self.pixels: NDArray[np.uint8] = np.empty((len(seeds), *transform.shape), np.uint8)
        """``u8[n, ...]``, with the transform's shape."""

    def fill(self, place: int, image: Any) -> NDArray[np.uint8]:
        """Return the place in :attr:`pixels`, filled with what becomes of ``image``.

        Raises what the transform does.
        """
        is_random = self._transform.is_random
        rng = np.random.default_rng(self._seeds[place]) if is_random else None
        return self._transform(image, rng, self.pixels[place])
