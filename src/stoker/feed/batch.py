"""One batch as the training loop gets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import ServedBatch


@dataclass(frozen=True, eq=False, slots=True)
class Batch(ServedBatch):
    """``n`` samples, and what they are; give it to ``Feed.observe``."""

    data: Any = None
    """An array ``[n, ...]`` where the samples are arrays or numbers of one shape and dtype, else a
    list of ``n`` samples: bytes without a decoder."""
    targets: NDArray[Any] | None = None
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


_OF_NUMBERS = (np.ndarray, np.generic, bool, int, float)
