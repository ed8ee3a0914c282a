"""The latest embedding of every sample that has one, without gaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError


class VectorTable:
    """Embeddings in rows, numbered in the order in which their samples first came.

    4 d bytes a sample, taken as samples come. Written by one thread; another may read, and may
    then find a row half written.
    """

    def __init__(self, num_samples: int) -> None:
        """Make room for ids below ``num_samples``; ConfigError unless it is positive."""
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is refused: give at least 1 sample")
        self.capacity = num_samples
        """Rows at most."""
        self.count = 0
        """Rows so far."""
        self._row = np.full(num_samples, -1, np.int64)
        self._ids = np.zeros(num_samples, np.uint32)
        self._vectors = np.empty((num_samples, 0), np.float32)

    @property
    def ids(self) -> NDArray[np.uint32]:
        """``u32[count]``, the sample of each row."""
        return self._ids[: self.count]

    @property
    def vectors(self) -> NDArray[np.float32]:
        """``f32[count, d]``, contiguous; the first vectors that come set d."""
        return self._vectors[: self.count]

    def put(self, ids: NDArray[np.uint32], vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        """Store ``f32[n, d]`` for u32[n] ``ids``, all different; return their rows ``i64[n]``.

        Raises ConfigError, and changes nothing, for an id out of range and for vectors of another
        dimension than before.
        """
        if not len(ids):
            return np.empty(0, np.int64)
        if int(ids.max()) >= self.capacity:
            raise ConfigError(f"id {ids.max()} is out of range: give ids below {self.capacity}")
        dimension = vectors.shape[1]
        if dimension == 0 or (self.count and dimension != self._vectors.shape[1]):
            before = f"{self._vectors.shape[1]} before" if self.count else "none before"
            raise ConfigError(
                f"embeddings of dimension {dimension} are refused ({before}): give the output of "
                "one and the same layer, flattened to [batch, dimension], at every step"
            )
        if not self.count:
            self._vectors = np.empty((self.capacity, dimension), np.float32)
        new = ids[self._row[ids] < 0]
        self._row[new] = np.arange(self.count, self.count + len(new))
        self._ids[self.count : self.count + len(new)] = new
        rows = self._row[ids]
        self._vectors[rows] = vectors
        self.count += len(new)
        return rows
