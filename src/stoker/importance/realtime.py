"""Realtime evaluation: every sample is scored anew before each plan."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.importance.loss import LossHistory
from stoker.scores import Scores


class Realtime(Scorer):
    """The last loss, and all samples volatile once training has begun.

    What ImPACT (IEEE TC 2025) compares its hybrid evaluation with: the scores are never stale, at
    the price of a forward pass over the whole data set in each epoch. No state beyond the epoch,
    which the next :meth:`begin_epoch` tells anew.
    """

    needs: ClassVar[frozenset[Signal]] = LossHistory.needs

    def __init__(self, num_samples: int) -> None:
        """Prepare for ids below ``num_samples``; ConfigError unless it is positive."""
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is refused: give at least 1 sample")
        self._num_samples = num_samples
        self._begun = False

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[N]``, every id; none before the model has learned anything."""
        return np.arange(self._num_samples if self._begun else 0, dtype=np.uint32)

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Note whether there is a trained model to score with."""
        self._begun = bool(scores.seen.any())

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the losses; raises ConfigError if there are none."""
        LossHistory().update(scores, observation)
