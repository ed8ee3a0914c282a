"""Samples in miniature: lengths in proportion, so that a cache of any size takes little memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MEAN = 64  # units that a sample of mean size has: lengths are true to a percent


@dataclass(frozen=True)
class Scale:
    """Bytes and the units of the miniature."""

    unit: float
    """Bytes of a unit."""
    sizes: NDArray[np.int64]
    """``i64[N]``, units of each sample, 1 or more."""

    @classmethod
    def of(cls, sizes: NDArray[np.int64]) -> Scale:
        """Return the scale for samples of ``sizes`` (``i64[N]``) bytes; equal ones are one unit."""
        if len(sizes) and (sizes == sizes[0]).all():
            return cls(float(sizes[0]), np.ones(len(sizes), np.int64))
        unit = max(1.0, float(sizes.mean()) / _MEAN)
        return cls(unit, np.maximum(1, np.rint(sizes / unit)).astype(np.int64))

    def units(self, share: float) -> int:
        """Return the units of ``share`` of all samples, 0 to 1."""
        return round(share * int(self.sizes.sum()))
