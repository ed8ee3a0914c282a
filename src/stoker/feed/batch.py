"""A batch as the training loop gets it; from what the loop shows of it, what it is scored by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.batch import ServedBatch
from stoker.epoch.observer import Signals
from stoker.errors import ConfigError
from stoker.importance.base import Signal

_OF_NUMBERS = (np.ndarray, np.generic, bool, int, float)
_IGNORED = -100  # the label of positions that do not count, as in torch


@dataclass(frozen=True, eq=False, slots=True)
class Batch(ServedBatch):
    """``n`` samples, and what they are; give it to ``Feed.observe``."""

    data: Any = None
    """An array ``[n, ...]`` where the samples are arrays or numbers of one shape and dtype, else a
    list of ``n`` samples: bytes without a decoder. One :class:`stoker.source.Packed` with
    ``decode="packed"``, a dictionary of arrays with ``batching=``. With ``to_device``, what that
    made of it."""
    targets: Any = None
    """``[n, ...]``, the targets of the samples really served; None where there are none."""

    @property
    def weights(self) -> NDArray[np.float32]:
        """The weight of each sample in the loss, ``f32[n]``.

        A recipe that learns from a part of each batch only sets them in ``Feed.observe``.
        """
        self.note_weights_used()
        if self.plan_weights is None:
            return np.ones(len(self.ids), np.float32)
        return self.plan_weights.copy()


def stacked(samples: list[Any]) -> Any:
    """Return arrays or numbers of one shape and dtype as one array ``[n, ...]``, else a list."""
    if not all(isinstance(sample, _OF_NUMBERS) for sample in samples):
        return samples
    arrays = [np.asarray(sample) for sample in samples]
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        return samples
    return np.stack(arrays)


class Shown(NamedTuple):
    """What the training loop gave for one batch: anything that NumPy makes an array of."""

    losses: ArrayLike | None = None
    logits: ArrayLike | None = None
    labels: ArrayLike | None = None
    embeddings: ArrayLike | None = None

    def signals(self, needs: frozenset[Signal], length: int) -> Signals:
        """Return the losses and the needed signals of ``length`` samples, as far as they are there.

        Raises :class:`~stoker.errors.ConfigError` for shapes that do not fit, and if there is
        nothing.
        """
        found: Signals = {}
        if "embeddings" in needs and self.embeddings is not None:
            found["embeddings"] = _rows("embeddings", self.embeddings, length, 2, np.float32)
        if self.losses is not None:
            found["losses"] = _rows("losses", self.losses, length, 1, np.float64)
        elif self.logits is not None and self.labels is not None:
            found["losses"] = cross_entropy(self.logits, self.labels, length)
        elif "embeddings" not in found:
            raise ConfigError("observe() got no losses: give losses, or logits and labels")
        if "gradient_norms" in needs and self.logits is not None and self.labels is not None:
            found["gradient_norms"] = gradient_norms(self.logits, self.labels, length)
        if "labels" in needs and self.labels is not None:
            found["labels"] = _rows("labels", self.labels, length, 1, np.int64)
        return found


def cross_entropy(logits: ArrayLike, labels: ArrayLike, length: int) -> NDArray[np.float64]:
    """Return the cross entropy of each of ``length`` samples, ``f64[n]``.

    ``logits`` is ``[n, ..., classes]`` and ``labels`` ``int[n, ...]``. A sample's loss is the mean
    over its positions but those labelled -100, and NaN when it has no other. Raises
    :class:`~stoker.errors.ConfigError` for shapes that do not fit.
    """
    scores, classes, counts = _positions(logits, labels, length)
    own = np.take_along_axis(scores, np.where(counts, classes, 0)[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(scores).sum(axis=-1)) - own
    return _mean(losses, counts)


def gradient_norms(logits: ArrayLike, labels: ArrayLike, length: int) -> NDArray[np.float64]:
    """Return the norm of the gradient of each sample's cross entropy by its logits, ``f64[n]``.

    Shapes and errors as for :func:`cross_entropy`. ||softmax(logits) - onehot(label)|| for
    classification (Katharopoulos and Fleuret, ICML 2018, Eq. 16-20, the factor of the last
    layer), and of the mean over positions otherwise.
    """
    scores, classes, counts = _positions(logits, labels, length)
    shares = np.exp(scores)
    shares /= shares.sum(axis=-1, keepdims=True)
    own = np.where(counts, classes, 0)[..., None]
    np.put_along_axis(shares, own, np.take_along_axis(shares, own, axis=-1) - 1, axis=-1)
    squared = np.where(counts, (shares**2).sum(axis=-1), 0.0).reshape(length, -1).sum(axis=1)
    counted = counts.reshape(length, -1).sum(axis=1)
    with np.errstate(invalid="ignore"):
        norms: NDArray[np.float64] = np.sqrt(squared) / counted
    return norms


def _positions(
    logits: ArrayLike, labels: ArrayLike, length: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return shifted logits ``[n, ..., c]``, labels ``[n, ...]``, and which positions count."""
    scores, classes = np.asarray(logits, np.float64), np.asarray(labels)
    if scores.shape[:-1] != classes.shape or classes.shape[:1] != (length,):
        raise ConfigError(
            f"observe() got logits of shape {list(scores.shape)} and labels of shape "
            f"{list(classes.shape)} for a batch of {length} samples: give [batch, ..., classes] "
            "and [batch, ...]"
        )
    if classes.dtype.kind not in "iu":
        raise ConfigError(f"observe() got labels of {classes.dtype}: give class numbers")
    classes = classes.astype(np.int64)
    counts = classes != _IGNORED
    if (counts & ((classes < 0) | (classes >= scores.shape[-1]))).any():
        raise ConfigError(
            f"observe() got labels from {classes[counts].min()} to {classes[counts].max()}: there "
            f"are {scores.shape[-1]} classes"
        )
    return scores - scores.max(axis=-1, keepdims=True), classes, counts


def _mean(values: NDArray[np.float64], counts: NDArray[np.bool_]) -> NDArray[np.float64]:
    rows = len(values)
    sums = np.where(counts, values, 0.0).reshape(rows, -1).sum(axis=1)
    with np.errstate(invalid="ignore"):
        # 0 / 0 is NaN on purpose: a sample without a labelled position has no loss.
        mean: NDArray[np.float64] = sums / counts.reshape(rows, -1).sum(axis=1)
    return mean


def _rows(name: str, given: ArrayLike, length: int, axes: int, dtype: Any) -> NDArray[Any]:
    """Return a copy of ``given`` as ``[length]`` or ``[length, d]``; observations are kept."""
    array = np.asarray(given)
    if array.ndim != axes or len(array) != length:
        shape = "[batch]" if axes == 1 else "[batch, dimension]"
        raise ConfigError(
            f"observe() got {name} of shape {list(array.shape)} for a batch of {length} samples: "
            f"give one row per sample, {shape}"
        )
    if dtype is np.int64 and array.dtype.kind not in "iu":
        raise ConfigError(f"observe() got {name} of {array.dtype}: give class numbers")
    return np.array(array, dtype)
