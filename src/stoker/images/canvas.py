"""The memory of a batch of images, and whose random numbers fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.images.transforms import ImageTransform


class Canvas:
    """``n`` rows for what ``transform`` makes of images; each has random numbers of its own.

    ``seeds`` are the ``n`` seeds of the rows, from 0 to 2**64 - 1. Several threads may fill
    different rows.
    """

    def __init__(
        self,
        transform: ImageTransform,
        seeds: Sequence[int],
        pixels: NDArray[np.uint8] | None = None,
    ) -> None:
        self._transform, self._seeds = transform, seeds
        if pixels is None:
            pixels = np.empty((len(seeds), *transform.shape), np.uint8)
        self.pixels = pixels
        """``u8[n, ...]``, with the transform's shape."""

    def fill(self, row: int, image: Any) -> NDArray[np.uint8]:
        """Return the row in :attr:`pixels`, filled with what becomes of ``image``.

        Raises what the transform does.
        """
        rng = None
        if self._transform.is_random:
            rng = np.random.default_rng(self._seeds[row])
        return self._transform(image, rng, self.pixels[row])

    def at(self, rows: Sequence[int]) -> Canvas:
        """Return the canvas of some consecutive rows, over the same memory."""
        span = slice(rows[0], rows[-1] + 1)
        return Canvas(self._transform, self._seeds[span], self.pixels[span])
