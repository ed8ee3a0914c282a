"""Reducible loss: what is left of a sample's loss when noise is taken away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.scores import Scores


@dataclass(frozen=True)
class ReducibleLoss(Scorer):
    """s_i = loss_i - reference_i.

    Mindermann et al. (ICML'22), Eq. 3 (RHO-LOSS): the reference is the loss of sample i
    under a model trained on held-out data, which stays high for wrong labels and ambiguous
    samples. Scores may be negative. A loss that is NaN or infinite leaves its sample's score as
    it was. Raises :class:`~stoker.errors.ConfigError` unless the reference is finite.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    reference: NDArray[np.float64] = field(repr=False)
    """``f64[N]``, irreducible loss of each sample."""

    def __post_init__(self) -> None:
        reference = np.array(self.reference, dtype=np.float64)
        if reference.ndim != 1 or not len(reference) or not np.isfinite(reference).all():
            raise ConfigError(
                f"reference of shape {reference.shape} is refused: give one finite loss per sample"
            )
        reference.flags.writeable = False
        object.__setattr__(self, "reference", reference)

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the reducible losses.

        Raises ConfigError if there are no losses, or not as many references as samples.
        """
        if len(self.reference) != len(scores):
            raise ConfigError(
                f"reference holds {len(self.reference)} losses for {len(scores)} samples: give one "
                "for each sample of the data set"
            )
        ids, losses = observation.finite("losses")
        scores.update(ids, losses - self.reference[ids], observation.step)
