"""Which samples lie near those of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Neighbours:
    """The edges that a graph found for the samples of one batch; an immutable value."""

    step: int
    """Of the batch."""
    ids: NDArray[np.uint32]
    """``u32[n]``, samples of the batch, each once."""
    degree: NDArray[np.int64]
    """``i64[n]``, number of neighbours of each, without itself."""
    offsets: NDArray[np.int64]
    """``i64[n + 1]``: the neighbours of sample i are ``neighbours[offsets[i]:offsets[i + 1]]``."""
    neighbours: NDArray[np.uint32]
    """``u32[degree.sum()]``, nearest first."""
