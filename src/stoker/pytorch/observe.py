"""What the training loop shows in tensors, on the way to those who score.

Losses, norms of gradients, copies to the host, and exact nearest neighbours on an accelerator.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from stoker.epoch.batch import ServedBatch
from stoker.epoch.observer import Arrived, Observer
from stoker.errors import ConfigError
from stoker.importance.base import Scorer, Signal
from stoker.importance.knn import Nearest, VectorTable
from stoker.pytorch.hand_over import weights_of

Tensors = Mapping[Signal, torch.Tensor]
"""Signals by name, each ``[n, ...]``, detached, wherever they were computed."""
_TYPES: dict[Signal, torch.dtype] = {"labels": torch.int64, "embeddings": torch.float32}

_CHUNK = 1 << 16
"""Rows compared at a time, which bounds the memory for distances: 256 KiB a query."""


class TensorObserver:
    """Computes the signals of a batch where its tensors lie, and copies them to an Observer.

    Used by the training process only, from one thread at a time.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._device: torch.device | None = None

    def observe(self, shown: Shown, meta: ServedBatch | None = None) -> None:
        """Take what the training loop shows of one batch; see ``Loader.observe``."""
        began = time.perf_counter()
        batch = self._observer.batch(meta)
        signals = shown.signals(self._observer.scorer.needs, len(batch))
        embeddings = signals.get("embeddings")
        if embeddings is not None and self._observer.begins(embeddings):
            search_on(embeddings.device, self._observer.scorer)
        self._device = next(iter(signals.values())).device
        copy = start_copy(signals)
        self._observer.add(batch, Arrived(copy.arrays()) if copy.has_arrived else copy, began)

    def rescore(self, meta: ServedBatch, losses: Any) -> None:
        """Have a batch that is none of training's scored by its losses ``[n]``."""
        signals = start_copy(Shown(losses).signals(frozenset(), len(meta))).arrays()
        self._observer.rescore(meta.ids, meta.epoch, signals)

    def weights(self) -> torch.Tensor:
        """Return the loss weights of the batch that is spoken of; see ``Loader.weights``."""
        weights = weights_of(self._observer.weighed())
        return weights if self._device is None else weights.to(self._device, non_blocking=True)


def per_sample_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    shift: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each sample, ``float[batch]``, differentiable.

    ``logits`` is ``[batch, ..., classes]`` and ``labels`` ``int[batch, ...]``: classification
    without inner dimensions, token models with one, ``[batch, time]``. Positions labelled
    ``ignore_index`` do not count; a sample's loss is the mean over its other positions, and NaN
    when it has none (``Loader.observe`` then keeps its old score). ``shift=True`` compares
    position ``t`` with label ``t + 1``, for causal language models whose labels are their inputs.

    Raises :class:`~stoker.errors.ConfigError` for shapes that do not fit. Safe in any thread.
    """
    _check_shapes(logits, labels)
    if shift:
        if labels.ndim < 2:
            raise ConfigError(f"shift=True needs labels [batch, time], not {list(labels.shape)}")
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = functional.cross_entropy(
        _single(logits).reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    )
    rows = _rows(labels)
    counted = (labels != ignore_index).reshape(rows).sum(dim=1)
    # 0 / 0 is NaN on purpose: a sample without a labelled position has no loss.
    return flat.reshape(rows).sum(dim=1) / counted


@torch.no_grad()
def gradient_norms(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the norm of the gradient of each sample's loss by its logits, ``float[batch]``.

    Shapes, errors and samples without a labelled position as for :func:`per_sample_loss`. With
    p = softmax(logits): ||p - onehot(label)|| for classification (Katharopoulos and Fleuret,
    ICML 2018, Eq. 16-20, the factor of the last layer), and of the mean over positions otherwise.
    Computed where the logits are.
    """
    _check_shapes(logits, labels)
    shares = _single(logits).softmax(dim=-1)
    counts = labels != ignore_index
    own = shares.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    # ||p - y||^2 without the one-hot vectors; rounding may take it below 0.
    squares = ((shares * shares).sum(dim=-1) - 2 * own + 1).clamp(min=0) * counts
    rows = _rows(labels)
    return squares.reshape(rows).sum(dim=1).sqrt() / counts.reshape(rows).sum(dim=1)


def _check_shapes(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape or labels.ndim == 0:
        raise ConfigError(
            f"logits {list(logits.shape)} do not fit labels {list(labels.shape)}: give logits "
            "[batch, ..., classes] and labels [batch, ...]"
        )


def _single(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _rows(labels: torch.Tensor) -> tuple[int, int]:
    return labels.shape[0], math.prod(labels.shape[1:])


class Shown(NamedTuple):
    """What the training loop gave for one batch."""

    losses: Any = None
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None

    def signals(self, needs: frozenset[Signal], length: int) -> dict[Signal, torch.Tensor]:
        """Return the losses and the needed signals of ``length`` samples, as far as they are there.

        What has to be computed is computed where its input lies; nothing is moved. Raises
        :class:`~stoker.errors.ConfigError` for shapes that do not fit, and if there is nothing.
        """
        found: dict[Signal, torch.Tensor] = {}
        if self.embeddings is not None:
            vectors = _embeddings(self.embeddings, length)
            if "embeddings" in needs:
                found["embeddings"] = vectors
        if self.losses is not None:
            found["losses"] = _losses(self.losses, length)
        elif self.logits is not None and self.labels is not None:
            found["losses"] = _losses(per_sample_loss(self.logits.detach(), self.labels), length)
        elif "embeddings" not in found:
            raise ConfigError("observe() got no losses: give losses, or logits and labels")
        if "gradient_norms" in needs and self.logits is not None and self.labels is not None:
            norms = gradient_norms(self.logits.detach(), self.labels)
            found["gradient_norms"] = _losses(norms, length)
        if "labels" in needs and self.labels is not None:
            found["labels"] = _labels(self.labels, length)
        return found


class Copy(NamedTuple):
    """Signals on their way to the host."""

    tensors: dict[Signal, torch.Tensor]
    """On the host; their values are there when all of ``done`` are."""
    done: list[Any]
    """Events of the accelerators that they come from; none if they are there."""

    @property
    def has_arrived(self) -> bool:
        """Whether the values are there."""
        return all(event.query() for event in self.done)

    def arrays(self) -> dict[Signal, NDArray[Any]]:
        """Return the signals in the types of an Observation; waits for them."""
        for event in self.done:
            event.synchronize()
        return {name: _array(name, tensor) for name, tensor in self.tensors.items()}


def start_copy(tensors: Tensors) -> Copy:
    """Start copying to pinned memory while the streams that compute ``tensors`` continue.

    A kind of device that has no events to tell when that is done is waited for.
    """
    copied: dict[Signal, torch.Tensor] = {}
    done: dict[torch.device, Any] = {}
    for name, tensor in tensors.items():
        device = tensor.device
        kind: Any = getattr(torch, device.type, None)
        if device.type == "cpu" or not (hasattr(kind, "Event") and hasattr(kind, "current_stream")):
            copied[name] = tensor.cpu()
            continue
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copied[name] = target.copy_(tensor, non_blocking=True)
        done[device] = kind.Event()
    for device, event in done.items():
        event.record(getattr(torch, device.type).current_stream(device))
    return Copy(copied, list(done.values()))


def _array(name: Signal, tensor: torch.Tensor) -> NDArray[Any]:
    # A copy in any case: the training loop may write to its tensors, and observations are kept.
    array: NDArray[Any] = tensor.to(_TYPES.get(name, torch.float64), copy=True).numpy()
    return array


def _losses(losses: Any, length: int) -> torch.Tensor:
    values = torch.as_tensor(losses).detach()
    if values.ndim == 0:
        raise ConfigError(
            "observe() got a single number: give one loss per sample, reduction='none'"
        )
    if values.shape != (length,):
        raise ConfigError(
            f"observe() got losses of shape {list(values.shape)} for a batch of {length} samples: "
            "give one loss per sample"
        )
    return values


def _embeddings(embeddings: torch.Tensor, length: int) -> torch.Tensor:
    vectors = torch.as_tensor(embeddings).detach()
    if len(vectors) != length:
        raise ConfigError(
            f"observe() got {len(vectors)} embeddings for a batch of {length} samples"
        )
    if vectors.ndim != 2:
        raise ConfigError(
            f"observe() got embeddings of shape {list(vectors.shape)}: give one vector per sample, "
            "[batch, dimension]"
        )
    return vectors


def _labels(labels: torch.Tensor, length: int) -> torch.Tensor:
    classes = torch.as_tensor(labels).detach()
    if classes.shape != (length,) or classes.is_floating_point():
        raise ConfigError(
            f"observe() got labels of shape {list(classes.shape)}, {classes.dtype}, for a batch of "
            f"{length} samples: this recipe needs one class number per sample"
        )
    return classes


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
