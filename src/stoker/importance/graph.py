"""Graph score: samples that lie alone, or among other classes, matter more."""

from __future__ import annotations

import warnings
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.importance.knn import FlatIndex, HnswIndex, MakeIndex, NearestIndex, VectorTable
from stoker.importance.quantized import CodeIndex, CodeTable
from stoker.scores import Scores

EXACT_UP_TO = 100_000
"""Samples up to which neighbours are searched exactly unless an index is given."""

_MEMORY = 256
"""Samples over which the calibration is averaged, about."""
_LOW_RECALL = 0.9
"""Below it a warning says that scores from neighbours are not to be trusted."""


class Graph(Scorer):
    """s = ln(1 / x_same + x_other / neighbor_max + 1).

    SpiderCache (ICPP'25), graph-based importance. Samples are nodes at their latest embeddings,
    those of the layer before the classifier; d is the L2 distance, sim = exp(-decay d), and two
    samples share an edge if sim > threshold. Of a sample's ``neighbor_max`` nearest neighbours
    that share an edge with it, x_same have its label, the sample itself among them (so x_same is
    never 0), and x_other have another one. Scores lie between ln(1 + 1 / (neighbor_max + 1)), in
    the midst of its class, and ln 3.

    The paper fits decay and threshold to the scale of a model's embeddings, which drifts while it
    learns. Only -ln(threshold) / decay, the radius of the edges, matters. With ``threshold`` None
    it is **calibrated**: with every batch, to the value at which the mean degree of the last few
    hundred samples is ``target_degree``. Scores of different times stay comparable, also while
    most embeddings date from an earlier state of the model; it is our choice, not the paper's.

    The index is exact (faiss) up to :data:`EXACT_UP_TO` samples, and HNSW (usearch) beyond, whose
    recall is measured once an epoch; ``index`` replaces it. Under data parallelism each rank knows
    the embeddings of the samples it has seen itself. A sample whose embedding is NaN or infinite
    is left out. Deterministic with an exact index. Used by one thread at a time, and slow on a
    CPU: see :class:`~stoker.importance.Background`.

    With ``code_bytes`` embeddings are product-quantized to so many bytes each, as the paper's are
    (:class:`~stoker.importance.quantized.CodeTable`), and all codes are searched.

    Memory: 4 d + 21 bytes a sample (``code_bytes`` in place of 4 d if quantized), and the index:
    none if exact or quantized, 2 d + about 290 bytes a sample for HNSW, twice that during a
    rebuild. Measured at a million vectors of dimension 64: 0.67 GB for HNSW
    (``benchmarks/index_memory.py``).
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"embeddings", "labels"})

    neighbours: Neighbours | None = None
    """Edges of the batch scored last; None before the first."""

    def __init__(
        self,
        num_samples: int,
        *,
        neighbor_max: int = 500,
        target_degree: float = 50.0,
        decay: float = 1.0,
        threshold: float | None = None,
        index: MakeIndex | None = None,
        code_bytes: int | None = None,
    ) -> None:
        """Prepare for ids below ``num_samples``.

        Raises ConfigError for numbers out of range and if the index's library is not installed.
        """
        if neighbor_max < 1 or neighbor_max != int(neighbor_max):
            raise ConfigError(
                f"neighbor_max={neighbor_max} is out of range: give a whole number, at least 1"
            )
        if not 0 < target_degree <= neighbor_max:
            raise ConfigError(
                f"target_degree={target_degree} is out of range: give more than 0 and at most "
                f"neighbor_max={neighbor_max}"
            )
        if not 0 < decay < np.inf:
            raise ConfigError(f"decay={decay} is out of range: give a positive number")
        if threshold is not None and not 0 < threshold < 1:
            raise ConfigError(
                f"threshold={threshold} is out of range: give 0 < threshold < 1 or None"
            )
        self.recall = 1.0
        """Share of the true neighbours that the index found when it was measured last."""
        if index is not None and code_bytes is not None:
            raise ConfigError("index= and code_bytes= exclude each other: leave one out")
        self._has_own_index = index is not None or code_bytes is not None
        self._code_bytes = code_bytes
        self._neighbor_max, self._target_degree = neighbor_max, target_degree
        self._decay, self._is_fixed = decay, threshold is not None
        self._table = self._new_table(num_samples)
        self._labels = np.zeros(num_samples, np.int64)
        self._radius = 0.0 if threshold is None else -np.log(threshold) / decay
        self._measured_at = -1
        if code_bytes is not None:
            index = CodeIndex
        elif index is None:
            index = FlatIndex if num_samples <= EXACT_UP_TO else HnswIndex
        self._make_index = index
        self._index: NearestIndex = index(self._table)

    @property
    def threshold(self) -> float:
        """The similarity above which samples share an edge, as it is now."""
        return float(np.exp(-self._decay * self._radius))

    def use_accelerator(self, index: MakeIndex) -> None:
        """Search with ``index``, unless one was given at construction."""
        if not self._has_own_index:
            self.use_index(index)

    def use_index(self, index: MakeIndex) -> None:
        """Search with another index from now on, such as one on an accelerator."""
        self._make_index = index
        self._index.close()
        self._index = index(self._table)
        if self._table.count:
            self._index.changed(np.arange(self._table.count))

    def update(self, scores: Scores, observation: Observation) -> None:
        """Move the batch's samples to their new embeddings and write their scores.

        Raises ConfigError if there are no embeddings or labels, for embeddings of another
        dimension than before, and for ids out of range.
        """
        embeddings, labels = observation.signal("embeddings"), observation.signal("labels")
        finite = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
        shown = observation.ids[finite]
        ids, from_last, back = np.unique(shown[::-1], return_index=True, return_inverse=True)
        chosen = finite[::-1][from_last]
        rows = self._table.put(ids, embeddings[chosen])
        if not len(rows):
            return
        self._labels[ids] = labels[chosen]
        self._index.changed(rows)
        values = self._score(ids, rows, embeddings[chosen], observation.step)
        scores.update(shown, values[back[::-1]], observation.step)

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Measure the recall of the index; warns if it is low (RuntimeWarning)."""
        if epoch == self._measured_at:
            return
        self._measured_at = epoch
        near = max(round(self._target_degree), 1)
        self.recall = self._index.recall(near, self._neighbor_max + 1)
        if self.recall < _LOW_RECALL:
            warnings.warn(
                f"the index finds {self.recall:.0%} of the true neighbours, so scores from "
                "neighbours are inaccurate until it has been rebuilt",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Free the index."""
        self._index.close()

    def _new_table(self, num_samples: int) -> VectorTable:
        if self._code_bytes is None:
            return VectorTable(num_samples)
        return CodeTable(num_samples, self._code_bytes)

    def _score(
        self,
        ids: NDArray[np.uint32],
        rows: NDArray[np.int64],
        embeddings: NDArray[np.float32],
        step: int,
    ) -> NDArray[np.float64]:
        """Return the scores of these samples, and keep their neighbours."""
        found, distances, is_other = self._nearest(rows, embeddings)
        if not self._is_fixed:
            self._calibrate(distances[is_other], len(rows))
        edges = is_other & (distances < self._radius)
        neighbours = self._table.ids[found]
        same = edges & (self._labels[neighbours] == self._labels[ids][:, None])
        degree, x_same = edges.sum(axis=1), 1 + same.sum(axis=1)
        x_other = degree - same.sum(axis=1)
        self.neighbours = Neighbours.listed(step, ids, degree, neighbours[edges])
        scores: NDArray[np.float64] = np.log(1 / x_same + x_other / self._neighbor_max + 1)
        return scores

    def _nearest(
        self, rows: NDArray[np.int64], embeddings: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return rows and distances, and which are among the ``neighbor_max`` nearest others."""
        found, distances = self._index.search(embeddings, self._neighbor_max + 1)
        is_other = (found >= 0) & (found != rows[:, None])
        is_other &= np.cumsum(is_other, axis=1) <= self._neighbor_max
        return found, distances.astype(np.float64), is_other

    def _calibrate(self, distances: NDArray[np.float64], num_samples: int) -> None:
        """Move the radius towards the one at which these samples have the target degree."""
        wanted = min(max(round(self._target_degree * num_samples), 1), len(distances))
        if not wanted:
            return
        longest = np.partition(distances, wanted - 1)[wanted - 1]
        radius = float(np.nextafter(longest, np.inf))  # edges are shorter than the radius
        weight = min(num_samples / _MEMORY, 1.0) if self._radius else 1.0
        self._radius += weight * (radius - self._radius)

    def state_dict(self) -> dict[str, NDArray[np.generic]]:
        """Return the embeddings and labels known so far, and the calibration."""
        return {
            **self._table.arrays(),
            "labels": self._labels[self._table.ids],
            "radius": np.array(self._radius),
            "measured_at": np.array(self._measured_at),
        }

    def load_state_dict(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Continue from what :meth:`state_dict` returned; what was known here is forgotten.

        Raises ConfigError, and changes nothing, for ids out of range.
        """
        ids, table = np.asarray(state["ids"], np.uint32), self._new_table(self._table.capacity)
        table.restore(state)
        self._table = table
        self._labels[ids] = np.asarray(state["labels"], np.int64)
        self._radius = float(np.asarray(state["radius"], np.float64))
        self._measured_at = int(np.asarray(state["measured_at"], np.int64))
        self.neighbours = None
        self.use_index(self._make_index)
