"""Last-layer gradient norm: how far a sample would move the classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.importance.base import Observation, Scorer, Signal
from stoker.scores import Scores


@dataclass(frozen=True)
class GradientNorm(Scorer):
    """s_i = || softmax(logits_i) - onehot(label_i) ||, the gradient of the loss by the logits.

    Katharopoulos and Fleuret (ICML'18), section 3: up to a constant an upper bound of
    the norm of the whole gradient, between 0 and sqrt(2) for cross entropy. The norms arrive
    computed, since logits are best reduced on the device where they are. One that is NaN or
    infinite leaves its sample's score as it was.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"gradient_norms"})

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the norms; raises ConfigError if there are none."""
        ids, norms = observation.finite("gradient_norms")
        scores.update(ids, norms, observation.step)
