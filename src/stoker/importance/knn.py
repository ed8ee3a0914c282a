"""The latest embeddings, and indexes of their nearest neighbours: exact ones and one of usearch."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

_CHUNK = 4096
"""Rows added at a time while an index is built, between looks at whether to stop."""
_PROBES = 32
"""Rows whose true neighbours are looked up to measure the recall."""
_BY_PRODUCTS = 1
"""Queries, or numbers in them, from which faiss searches by products of matrices. Its own threshold
is above what a batch has, and one by one 64 queries of 256 numbers take three times as long."""
_GATHER = 1 << 22
"""Numbers of a table gathered at a time to measure distances."""


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
        if dimension == 0 or (self.count and dimension != self._dimension):
            before = f"{self._dimension} before" if self.count else "none before"
            raise ConfigError(
                f"embeddings have dimension {dimension} ({before}): give the output of "
                "one and the same layer, flattened to [batch, dimension], at every step"
            )
        if not self.count:
            self._reserve(dimension)
        rows = self._number(ids)
        self._store(rows, vectors)
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of ``ids`` and ``vectors``, for a checkpoint."""
        return {"ids": self.ids.copy(), "vectors": self.vectors.copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue, in a table that is empty, from what :meth:`arrays` returned.

        Raises ConfigError, and changes nothing, for ids out of range, and for vectors that were
        kept otherwise.
        """
        if "codes" in state:
            raise ConfigError("the state has quantized vectors: give the code_bytes of before")
        self.put(np.asarray(state["ids"], np.uint32), np.asarray(state["vectors"], np.float32))

    @property
    def _dimension(self) -> int:
        return self._vectors.shape[1]

    def _reserve(self, dimension: int) -> None:
        """Make room for vectors, when the first come."""
        self._vectors = np.empty((self.capacity, dimension), np.float32)

    def _number(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the rows of these samples, new ones for those that are new."""
        new = ids[self._row[ids] < 0]
        self._row[new] = np.arange(self.count, self.count + len(new))
        self._ids[self.count : self.count + len(new)] = new
        self.count += len(new)
        return self._row[ids]

    def _store(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._vectors[rows] = vectors


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


def nearest_of(
    faiss: Any, queries: NDArray[np.float32], vectors: NDArray[np.float32], k: int
) -> Nearest:
    """Return the nearest ``min(k, m)`` of ``f32[m, d]`` vectors to each of ``f32[n, d]`` queries.

    ``faiss`` is the module, of which the exact search is used: by products of matrices, whose
    distances differ from those of one by one by some millionths. That setting is the process's.
    """
    k = min(k, len(vectors))
    if not k or not len(queries):
        empty = (len(queries), k)
        return Nearest(np.empty(empty, np.int64), np.empty(empty, np.float32))
    faiss.cvar.distance_compute_blas_threshold = _BY_PRODUCTS
    squares, rows = faiss.knn(np.ascontiguousarray(queries), vectors, k)
    return Nearest(rows, np.sqrt(np.maximum(squares, 0)))


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
        return nearest_of(self._faiss, queries, self._table.vectors, k)

    def recall(self, k: int, m: int) -> float:
        """Return 1: the search is exact."""
        return 1.0

    def close(self) -> None:
        """Nothing to free."""


class HnswIndex:
    """A graph (HNSW) over the rows as they were, with distances to the rows as they are.

    New rows are added at once, by the one thread that uses the index. A row that changes stays
    where it was in the graph, since changing a graph in place costs recall, and its distance is
    measured again whenever it is found. Once ``rebuild_share`` of the rows have changed, or a
    measured recall is below ``min_recall``, a thread builds a new graph, which then replaces the
    old one. usearch releases the GIL while it searches and builds. What is found depends
    on when a build ends, so two runs may differ a little.

    Raises :class:`~stoker.errors.ConfigError` if usearch or faiss is not installed.
    """

    def __init__(
        self, table: VectorTable, *, rebuild_share: float = 0.25, min_recall: float = 0.9
    ) -> None:
        self.rebuilds = 0
        """Graphs that have taken the place of an older one."""
        self._table = table
        self._rebuild_share, self._min_recall = rebuild_share, min_recall
        self._exact = FlatIndex(table)
        self._make: Any = load("usearch.index").Index
        self._graph: Any = None
        self._stale = np.zeros(table.capacity, np.bool_)
        self._num_stale = 0
        self._build: _Build | None = None
        self._probes = np.random.default_rng(0)

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Add the rows that are new and note the others; begin or end a rebuild if it is due."""
        if self._graph is None:
            self._graph = self._empty_graph()
        if self._build is not None and self._build.is_done:
            self._swap(self._build)
        old = rows[rows < len(self._graph)]
        self._num_stale += int(np.count_nonzero(~self._stale[old]))
        self._stale[old] = True
        if self._build is not None:
            self._build.changed.append(old)
        _add(self._graph, self._table, len(self._graph), self._table.count, threads=1)
        if self._num_stale > self._rebuild_share * self._table.count:
            self._start_build()

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return what the graph finds, sorted by the distance to the rows as they are now."""
        k = min(k, self._table.count)
        rows = np.full((len(queries), k), -1, np.int64)
        if not rows.size:
            return Nearest(rows, np.empty(rows.shape, np.float32))
        found = self._graph.search(np.ascontiguousarray(queries), k)
        keys = found.keys.reshape(len(queries), -1)  # usearch flattens a single query's
        counts = np.atleast_1d(getattr(found, "counts", keys.shape[1]))
        valid = np.arange(keys.shape[1]) < counts[:, None]
        rows[:, : keys.shape[1]] = np.where(valid, keys.astype(np.int64), -1)
        distances = self._distances(queries, rows)
        order = np.argsort(distances, axis=1, kind="stable")
        return Nearest(
            np.take_along_axis(rows, order, axis=1), np.take_along_axis(distances, order, axis=1)
        )

    def recall(self, k: int, m: int) -> float:
        """Compare with an exact search for a few random rows; begin a rebuild if it is too low.

        A row counts as found if one as near was found, so that equal vectors do not matter.
        """
        count = self._table.count
        if not count:
            return 1.0
        probes = self._probes.choice(count, min(count, _PROBES), replace=False)
        queries = self._table.vectors[probes]
        true = self._distances(queries, self._exact.search(queries, k).rows)
        found = self.search(queries, m).distances[:, : true.shape[1]]
        share = float(np.mean(found <= true[:, -1:] * (1 + 1e-6)))
        if share < self._min_recall:
            self._start_build()
        return share

    def wait(self) -> None:
        """Wait until a rebuild under way, if any, has replaced the graph."""
        if self._build is not None:
            self._build.join()
            self._swap(self._build)

    def close(self) -> None:
        """End a rebuild that is under way, and free the graph."""
        if self._build is not None:
            self._build.stop()
        self._build = self._graph = None

    def _distances(self, queries: NDArray[np.float32], rows: NDArray[np.int64]) -> Any:
        """Return f32[n, m], the distance of each query to its rows of the table."""
        distances = np.full(rows.shape, np.inf, np.float32)
        vectors = self._table.vectors
        step = max(_GATHER // (rows.shape[1] * queries.shape[1]), 1)
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            difference = vectors[rows[part]] - queries[part, None]
            squares = np.einsum("nmd,nmd->nm", difference, difference)
            distances[part] = np.where(rows[part] < 0, np.inf, np.sqrt(squares))
        return distances

    def _empty_graph(self) -> Any:
        return self._make(ndim=self._table.vectors.shape[1], metric="l2sq", dtype="f16")

    def _start_build(self) -> None:
        if self._build is None:
            self._build = _Build(self._empty_graph(), self._table)

    def _swap(self, build: _Build) -> None:
        """Replace the old graph by the new one, and add rows that came while it was built.

        If it could not be built the old one stays, until as many rows have changed again.
        """
        self._build = None
        failure = build.join()
        if failure is None:
            _add(build.graph, self._table, build.count, len(self._graph))
            self._graph = build.graph
            self.rebuilds += 1
        else:
            warnings.warn(
                f"an index of neighbours could not be rebuilt ({failure!r}): the old one is "
                "searched, which misses more of them",
                RuntimeWarning,
                stacklevel=2,
            )
        self._stale.fill(False)
        for rows in build.changed:
            self._stale[rows] = True
        self._num_stale = int(np.count_nonzero(self._stale))


class _Build:
    """A thread that adds the rows of a table to a new graph; ends with the process."""

    def __init__(self, graph: Any, table: VectorTable) -> None:
        self.graph = graph
        self.count = table.count
        """Rows that the graph gets; it may see them half written, if they change meanwhile."""
        self.changed: list[NDArray[np.int64]] = []
        """Rows that changed since it began."""
        self._failure: list[Exception] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_fill,
            args=(graph, table, self.count, self._stopping, self._failure),
            name="stoker-hnsw-build",
            daemon=True,
        )
        self._thread.start()
        # Native code must not run on while the interpreter is taken down.
        self._at_exit = weakref.finalize(self, _end, self._thread, self._stopping, os.getpid())

    @property
    def is_done(self) -> bool:
        """Whether the graph is complete, or the build has failed."""
        return not self._thread.is_alive()

    def join(self) -> Exception | None:
        """Wait for the graph; return what went wrong."""
        self._thread.join()
        return self._failure[0] if self._failure else None

    def stop(self) -> None:
        """End before the graph is complete."""
        self._at_exit()


def _fill(
    graph: Any,
    table: VectorTable,
    count: int,
    stopping: threading.Event,
    failure: list[Exception],
) -> None:
    try:
        for start in range(0, count, _CHUNK):
            if stopping.is_set():
                return
            _add(graph, table, start, min(start + _CHUNK, count))
    except Exception as error:
        failure.append(error)


def _end(thread: threading.Thread, stopping: threading.Event, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no such thread
        stopping.set()
        thread.join()


def _add(graph: Any, table: VectorTable, start: int, end: int, *, threads: int = 0) -> None:
    """Add rows ``start`` to ``end`` of the table, with as many threads as there are CPUs if 0."""
    if start < end:
        keys = np.arange(start, end, dtype=np.uint64)
        graph.add(keys, table.vectors[start:end], threads=threads)
