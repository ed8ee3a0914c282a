"""Loss history: the score of a sample is the last loss that training saw for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.importance.base import Observation, Scorer, Signal
from stoker.scores import Scores


@dataclass(frozen=True)
class LossHistory(Scorer):
    """s_i = the loss at the last visit of sample i.

    The importance value of iCache (HPCA'23) and of Selective-Backprop; costs one write
    a sample. A loss that is NaN or infinite leaves the sample's score as it was.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the losses; raises ConfigError if there are none."""
        ids, losses = observation.finite("losses")
        scores.update(ids, losses, observation.step)
