"""Exact nearest neighbours on an accelerator."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.importance.base import Scorer
from stoker.importance.knn import Nearest, VectorTable

_CHUNK = 1 << 16
"""Rows compared at a time, which bounds the memory for distances: 256 KiB a query."""


def search_on(device: torch.device, scorer: Scorer) -> None:
    """Let a scorer that searches neighbours do so on an accelerator, before its first batch.

    Nothing changes on the CPU, for other scorers, and for a Graph that was given an index.
    """
    if device.type != "cpu":
        scorer.use_accelerator(partial(TorchIndex, device=device))


class TorchIndex:
    """Compares each query with every row of a copy of the table on ``device``.

    The counterpart of :class:`~stoker.importance.knn.FlatIndex` for
    ``Graph.use_index(partial(TorchIndex, device=...))``. On CUDA it works in a stream of its own,
    so that searching overlaps with the training step. Where training has products of matrices in
    less than float32 (TF32), distances are computed without products, which takes longer. Memory
    on the device: 4 d bytes a sample and up to 256 KiB a query; if the copy does not fit, a
    warning says so (RuntimeWarning) and it stays on the CPU.
    """

    def __init__(self, table: VectorTable, device: torch.device | str) -> None:
        self.device = torch.device(device)
        """Where the copy is."""
        self._table = table
        self._rows: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None
        stream: Any = torch.cuda.Stream
        self._stream = stream(self.device) if self.device.type == "cuda" else None

    def changed(self, rows: NDArray[np.int64]) -> None:
        """Copy these rows to the device."""
        with torch.inference_mode(), self._own_stream():
            if self._rows is None:
                self._allocate(self._table.capacity, self._table.vectors.shape[1])
            assert self._rows is not None and self._squares is not None
            index = torch.from_numpy(rows).to(self.device)
            vectors = torch.from_numpy(self._table.vectors[rows]).to(self.device)
            self._rows[index] = vectors
            self._squares[index] = vectors.square().sum(dim=1)

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Return the nearest rows."""
        count = self._table.count
        k = min(k, count)
        if not k or not len(queries):
            shape = (len(queries), k)
            return Nearest(np.empty(shape, np.int64), np.empty(shape, np.float32))
        with torch.inference_mode(), self._own_stream():
            asked = torch.from_numpy(np.array(queries)).to(self.device)
            parts = [
                self._nearest(asked, start, min(start + _CHUNK, count), k)
                for start in range(0, count, _CHUNK)
            ]
            squares, best = torch.cat([part[0] for part in parts], 1).topk(k, largest=False)
            rows = torch.cat([part[1] for part in parts], 1).gather(1, best)
            distances = squares.clamp_(min=0).sqrt_()
            return Nearest(rows.cpu().numpy(), distances.cpu().numpy())

    def recall(self, k: int, m: int) -> float:
        """Return 1: the search is exact."""
        return 1.0

    def close(self) -> None:
        """Free the copy."""
        self._rows = self._squares = None

    def _nearest(
        self, asked: torch.Tensor, start: int, end: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return squared distances, and rows of one chunk."""
        assert self._rows is not None and self._squares is not None
        k, chunk = min(k, end - start), self._rows[start:end]
        if not _multiplies_exactly():
            apart = torch.cdist(asked, chunk, compute_mode="donot_use_mm_for_euclid_dist")
            nearest, rows = apart.topk(k, largest=False)
            return nearest.square_(), rows + start
        squares = torch.addmm(self._squares[start:end], asked, chunk.T, alpha=-2)
        nearest, rows = squares.topk(k, largest=False)
        return nearest + asked.square().sum(dim=1, keepdim=True), rows + start

    def _allocate(self, capacity: int, dimension: int) -> None:
        try:
            self._rows = torch.empty(capacity, dimension, device=self.device)
        except torch.OutOfMemoryError as error:
            warnings.warn(
                f"{capacity} embeddings of dimension {dimension} do not fit on {self.device} "
                f"({error}): neighbours are searched on the CPU",
                RuntimeWarning,
                stacklevel=2,
            )
            self.device, self._stream = torch.device("cpu"), None
            self._rows = torch.empty(capacity, dimension)
        self._squares = torch.empty(capacity, device=self.device)

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream


def _multiplies_exactly() -> bool:
    """Whether products of float32 matrices are float32, and not TF32, as training may have asked.

    That holds for all threads, so it cannot be set otherwise for a search beside the training.
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by another API, which does not say what this one would
        return False
