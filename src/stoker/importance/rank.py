"""In-batch log-rank: how many samples of its batch a sample's loss exceeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.scores import Scores


@dataclass(frozen=True)
class InBatchRank(Scorer):
    """s_i = log(#{k in batch, k != i : loss_i > loss_k} + b0).

    SHADE (FAST'23), Eq. 6. Ranks compare samples of different batches although the
    model changes between them, and bound the say of outliers. Equal losses share a rank, so a
    batch of equal losses scores log(b0) throughout. A loss that is NaN or infinite takes no part
    and leaves its sample's score as it was. No rank exceeds the size of its batch, so the samples
    of a short last batch score low, as the formula has it. Raises
    :class:`~stoker.errors.ConfigError` for b0 below 1, which would make scores negative.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    b0: float = 10.0
    """Bias: the larger, the nearer the sampling by score is to uniform. The default is that of the
    authors' public code."""

    def __post_init__(self) -> None:
        if not 1 <= self.b0 < np.inf:
            raise ConfigError(f"b0={self.b0!r} is refused: give a finite number from 1 on")

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the log-ranks of the batch; raises ConfigError if there are no losses."""
        ids, losses = observation.finite("losses")
        exceeded = np.searchsorted(np.sort(losses), losses, side="left")
        scores.update(ids, np.log(exceeded + self.b0), observation.step)
