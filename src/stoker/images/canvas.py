"""The memory of a batch of images, and whose random numbers fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SampleCorrupt
from stoker.images.resize import cut_jpegs
from stoker.images.transforms import Drawing, ImageTransform


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
        return self.begin(row, image).into(self.pixels[row])

    def begin(self, row: int, image: Any) -> Drawing:
        """Return what becomes of ``image`` in the row, before it is decoded; raises as fill."""
        rng = None
        if self._transform.is_random:
            rng = np.random.default_rng(self._seeds[row])
        return self._transform.begin(image, rng)

    def finish(self, drawings: Mapping[int, Drawing]) -> dict[int, SampleCorrupt]:
        """Fill the rows of what began; return why some cannot be filled.

        JPEGs are cut in one call without the GIL: between two of them, Python's code would come
        from memory each time, and a thread would wait for the GIL.
        """
        jobs = {row: each.job(self.pixels[row]) for row, each in drawings.items()}
        possible = {row: job for row, job in jobs.items() if job is not None}
        done = set(compress(possible, cut_jpegs(list(possible.values()))))
        errors = {}
        for row in drawings.keys() - done:
            try:
                drawings[row].decode_into(self.pixels[row])
            except SampleCorrupt as error:
                errors[row] = error
        return errors

    def at(self, rows: Sequence[int]) -> Canvas:
        """Return the canvas of some consecutive rows, over the same memory."""
        span = slice(rows[0], rows[-1] + 1)
        return Canvas(self._transform, self._seeds[span], self.pixels[span])
