"""Embeddings kept as product-quantization codes, and the index that searches these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.knn import Nearest, VectorTable, load, nearest_of

_CENTROIDS = 256  # of each part, so that its code is a byte
_LEARN_FROM = 4096  # of the latest vectors
_ROUNDS = 8  # of k-means, each time
_CHUNK = 1 << 16
_PROBES = 32


class CodeTable(VectorTable):
    """A table whose vectors are codes of ``code_bytes`` bytes each, in place of 4 d.

    A vector is cut into that many parts, and each part is replaced by the nearest of 256
    centroids: product quantization (Jegou et al., IEEE TPAMI 33(1), 2011), by faiss, with which
    SpiderCache (ICPP 2025) compresses its index. The centroids are learned from the first 4,096
    samples, or from all if there are fewer, which are kept whole until then. As embeddings drift
    while a model learns, they are learned again from the latest 4,096 vectors whenever as many
    vectors came as there are samples; older codes are translated. Learning again is ours, the
    paper does not say. Of fewer than 256 samples all are kept whole. Deterministic.

    Memory: ``code_bytes`` and 12 bytes a sample, 4,096 vectors (up to 12,288 before they are codes)
    and the centroids. Used as :class:`~stoker.importance.knn.VectorTable` is. Raises
    :class:`~stoker.errors.ConfigError` for no samples, for ``code_bytes`` that are not a whole
    number from 1 on, and if faiss is not installed.
    """

    def __init__(self, num_samples: int, code_bytes: int) -> None:
        if code_bytes < 1 or code_bytes != int(code_bytes):
            raise ConfigError(
                f"code_bytes={code_bytes} is out of range: give a whole number, at least 1"
            )
        self._faiss: Any = load("faiss")
        self._quantizer: Any = None
        self._code_bytes = int(code_bytes)
        super().__init__(num_samples)
        self._window = min(num_samples, _LEARN_FROM)
        self._codes = np.empty((0, self._code_bytes), np.uint8)
        self._latest = np.empty((0, 0), np.float32)
        self._latest_rows = np.full(self._window, -1, np.int64)
        self._next = 0  # place in the latest
        self._since = 0  # vectors since the centroids were learned

    @property
    def vectors(self) -> NDArray[np.float32]:
        """``f32[count, d]``, decoded: a copy of 4 d bytes a sample."""
        if self._quantizer is None:
            return self._vectors[: self.count]
        return self._decoded(0, self.count)

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the ``k`` rows nearest to ``f32[n, d]``, by distances to what codes stand for."""
        k = min(k, self.count)
        if self._quantizer is None:
            return nearest_of(self._faiss, queries, self._vectors[: self.count], k)
        return self._search_codes(queries, self._codes[: self.count], k)

    def recall(self, k: int, m: int) -> float:
        """Return the share of the k nearest that a search for m >= k finds, of the latest vectors.

        1 as long as vectors are whole.
        """
        if self._quantizer is None:
            return 1.0
        kept = np.flatnonzero(self._latest_rows >= 0)
        rows, last = np.unique(self._latest_rows[self._in_order(kept)][::-1], return_index=True)
        vectors = self._latest[self._in_order(kept)][::-1][last]
        step = max(len(rows) // _PROBES, 1)
        probes = vectors[::step]
        true = nearest_of(self._faiss, probes, vectors, min(k, len(rows))).rows
        found = self._search_codes(probes, self._codes[rows], min(m, len(rows))).rows
        hits = [np.isin(t, f).mean() for t, f in zip(true, found, strict=True)]
        return float(np.mean(hits))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what is known, for a checkpoint; vectors as they are kept."""
        if self._quantizer is None:
            return super().arrays()
        return {
            "ids": self.ids.copy(),
            "vectors": np.empty((0, self._latest.shape[1]), np.float32),
            "codes": self._codes[: self.count].copy(),
            "centroids": self._faiss.vector_to_array(self._quantizer.centroids),
            "latest": self._latest.copy(),
            "latest_rows": self._latest_rows.copy(),
            "turns": np.array([self._next, self._since]),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue, in a table that is empty, from what :meth:`arrays` returned.

        Raises ConfigError, and changes nothing, for ids out of range and other ``code_bytes``.
        """
        if "codes" not in state:
            self.put(np.asarray(state["ids"], np.uint32), np.asarray(state["vectors"], np.float32))
            return
        codes = np.asarray(state["codes"], np.uint8)
        if codes.shape[1:] != (self._code_bytes,):
            raise ConfigError(
                f"the state has codes of {codes.shape[1:]} bytes: give the code_bytes of before, "
                f"in place of {self._code_bytes}"
            )
        ids = np.asarray(state["ids"], np.uint32)
        if len(ids) and int(ids.max()) >= self.capacity:
            raise ConfigError(f"id {ids.max()} is out of range: give ids below {self.capacity}")
        self._latest = np.asarray(state["latest"], np.float32)
        self._new_quantizer(self._latest.shape[1])
        self._faiss.copy_array_to_vector(
            np.asarray(state["centroids"], np.float32), self._quantizer.centroids
        )
        self._codes = np.zeros((self.capacity, self._code_bytes), np.uint8)
        self._number(ids)
        self._codes[: self.count] = codes
        self._latest_rows[:] = state["latest_rows"]
        self._next, self._since = (int(turn) for turn in state["turns"])

    # --- inside ---

    @property
    def _dimension(self) -> int:
        return self._latest.shape[1]

    def _reserve(self, dimension: int) -> None:
        self._latest = np.empty((self._window, dimension), np.float32)
        self._vectors = np.empty((min(2 * self._window, self.capacity), dimension), np.float32)

    def _store(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        vectors = np.ascontiguousarray(vectors, np.float32)
        self._keep_latest(rows, vectors)
        self._since += len(rows)
        if self._quantizer is not None:
            self._codes[rows] = self._encoded(vectors)
            if self._since >= self.capacity:
                self._learn(self._latest[self._in_order(np.arange(self._window))])
            return
        if self.count > len(self._vectors):
            grown = np.empty((self.count, vectors.shape[1]), np.float32)
            grown[: len(self._vectors)] = self._vectors
            self._vectors = grown
        self._vectors[rows] = vectors
        if self.count >= max(self._window, _CENTROIDS):
            self._learn(self._vectors[: self.count])

    def _keep_latest(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        rows, vectors = rows[-self._window :], vectors[-self._window :]
        places = (self._next + np.arange(len(rows))) % self._window
        self._latest[places], self._latest_rows[places] = vectors, rows
        self._next = (self._next + len(rows)) % self._window

    def _in_order(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``places`` among the latest, oldest first."""
        return places[np.argsort((places - self._next) % self._window)]

    def _learn(self, vectors: NDArray[np.float32]) -> None:
        """Learn centroids from ``vectors`` f32[n, d], and write all codes by them."""
        before, self._since = self._quantizer, 0
        self._new_quantizer(vectors.shape[1])
        if before is None:
            self._quantizer.train(self._parted(vectors))
            self._codes = np.zeros((self.capacity, self._code_bytes), np.uint8)
            self._codes[: self.count] = self._encoded(vectors)
            self._vectors = np.empty((0, self._dimension), np.float32)
            return
        self._faiss.copy_array_to_vector(
            self._faiss.vector_to_array(before.centroids), self._quantizer.centroids
        )
        self._quantizer.train_type = self._faiss.ProductQuantizer.Train_hot_start
        self._quantizer.train(self._parted(vectors))
        for start in range(0, self.count, _CHUNK):
            part = self._codes[start : min(start + _CHUNK, self.count)]
            part[:] = self._quantizer.compute_codes(before.decode(part))
        order = self._in_order(np.arange(self._window))
        # Of a sample that came twice the later vector is written last.
        self._codes[self._latest_rows[order]] = self._encoded(vectors)

    def _new_quantizer(self, dimension: int) -> None:
        parts = self._code_bytes
        self._quantizer = self._faiss.ProductQuantizer(-(-dimension // parts) * parts, parts, 8)
        self._quantizer.cp.niter = _ROUNDS
        self._quantizer.cp.min_points_per_centroid = 1  # fewer is what it warns of

    def _parted(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors with zeros at the end, so that parts have equal lengths."""
        missing = int(self._quantizer.d) - vectors.shape[1]
        return np.ascontiguousarray(np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors)

    def _encoded(self, vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
        codes: NDArray[np.uint8] = self._quantizer.compute_codes(self._parted(vectors))
        return codes

    def _decoded(self, start: int, end: int) -> NDArray[np.float32]:
        decoded: NDArray[np.float32] = self._quantizer.decode(self._codes[start:end])
        return decoded[:, : self._dimension]

    def _search_codes(
        self, queries: NDArray[np.float32], codes: NDArray[np.uint8], k: int
    ) -> Nearest:
        rows = np.empty((len(queries), k), np.int64)
        squares = np.empty((len(queries), k), np.float32)
        if rows.size:
            faiss, given = self._faiss, self._parted(queries)
            codes = np.ascontiguousarray(codes)
            heap = faiss.float_maxheap_array_t()
            heap.nh, heap.k = rows.shape
            heap.ids, heap.val = faiss.swig_ptr(rows), faiss.swig_ptr(squares)
            pointers = faiss.swig_ptr(given), len(given), faiss.swig_ptr(codes), len(codes)
            self._quantizer.search(*pointers, heap, True)
        return Nearest(rows, np.sqrt(np.maximum(squares, 0)))


class CodeIndex:
    """Compares each query with every code of a :class:`CodeTable`; releases the GIL meanwhile.

    The time of a search grows with the samples, as that of an exact one does. Raises
    :class:`~stoker.errors.ConfigError` for another table.
    """

    def __init__(self, table: VectorTable) -> None:
        if not isinstance(table, CodeTable):
            raise ConfigError(f"{type(table).__name__} has no codes: give a CodeTable")
        self._table = table

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Nothing to do: the codes are read where they are."""

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the nearest rows."""
        return self._table.search(queries, k)

    def recall(self, k: int, m: int) -> float:
        """Return :meth:`CodeTable.recall`."""
        return self._table.recall(k, m)

    def close(self) -> None:
        """Nothing to free."""
