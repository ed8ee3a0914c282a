"""Exact nearest neighbours with faiss."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.importance.knn import Nearest, load
from stoker.importance.vectors import VectorTable


class FlatIndex:
    """Compares each query with every row (faiss's flat search), without a copy of the rows.

    Releases the GIL while it searches. Raises :class:`~stoker.errors.ConfigError` if faiss is not
    installed.
    """

    def __init__(self, table: VectorTable) -> None:
        self._table = table
        self._faiss: Any = load("faiss")

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Nothing to do: the rows are read where they are."""

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the nearest rows."""
        vectors = self._table.vectors
        k = min(k, len(vectors))
        if not k or not len(queries):
            return Nearest(
                np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
            )
        squares, rows = self._faiss.knn(np.ascontiguousarray(queries), vectors, k)
        return Nearest(rows, np.sqrt(np.maximum(squares, 0)))

    def recall(self, k: int, m: int) -> float:
        """Return 1: the search is exact."""
        return 1.0

    def close(self) -> None:
        """Nothing to free."""
