"""The latest embeddings, and an exact index of their nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

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
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1 sample")
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
                f"embeddings have dimension {dimension} ({before}): give the output of "
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


class Nearest(NamedTuple):
    """Rows of a table that lie next to some queries, nearest first."""

    rows: NDArray[np.int64]
    """``i64[n, m]``, with -1 where fewer were found."""
    distances: NDArray[np.float32]
    """``f32[n, m]``, L2; infinite where fewer were found."""


class NearestIndex(Protocol):
    """Finds the rows of a table nearest to a query; used by one thread."""

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Note that these rows ``i64[n]`` of the table are new or hold another vector."""
        ...

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the nearest rows to ``f32[n, d]``: m = min(k, rows of the table) for each."""
        ...

    def recall(self, k: int, m: int) -> float:
        """Return the share of the k nearest rows that a search for m >= k finds; 1 if exact."""
        ...

    def close(self) -> None:
        """Free what it holds; it is not used afterwards."""
        ...


MakeIndex = Callable[[VectorTable], NearestIndex]


def load(name: str) -> Any:
    """Return a module of the extra ``importance``; ConfigError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"scores from neighbours need {package} ({error}): pip install 'stoker[importance]'"
        ) from error


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
