"""What looks at one number of a sample: scores by it, and the choice of those learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.scores import Scores


@dataclass(frozen=True)
class LossHistory(Scorer):
    """s_i = the loss at the last visit of sample i.

    The importance value of iCache (HPCA'23) and of Selective-Backprop; costs one write
    a sample. A loss that is NaN or infinite leaves the sample's score as it was.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})
    scores_are_losses: ClassVar[bool] = True

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the losses; raises ConfigError if there are none."""
        ids, losses = observation.finite("losses")
        scores.update(ids, losses, observation.step)


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
            raise ConfigError(f"b0={self.b0!r} is out of range: give a finite number from 1 on")

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the log-ranks of the batch; raises ConfigError if there are no losses."""
        ids, losses = observation.finite("losses")
        scores.update(ids, np.log(core.count_below(losses) + self.b0), observation.step)


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
                f"reference has shape {reference.shape}: give one finite loss per sample"
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


class SelectiveBackward:
    """Keeps a sample of a batch with probability percentile(loss)^beta.

    Selective-Backprop (Jiang et al. 2019): the percentile is the share of the
    last ``history`` losses that are at most the own one, those of the batch included. This is
    "computing-oriented importance sampling" (CIS), the baseline of iCache (HPCA'23): it saves
    computing and no I/O. The draws come from the caller's generator; the history is the only
    state. Not thread-safe. Raises :class:`~stoker.errors.ConfigError` for a beta that is negative
    or not finite, and for a history below 1.
    """

    def __init__(self, beta: float = 1.0, history: int = 1024) -> None:
        if not 0 <= beta < np.inf:
            raise ConfigError(f"beta={beta!r} is out of range: give 0 (keep all) or more")
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ConfigError(
                f"history={history!r} is out of range: give a number of losses, 1 or more"
            )
        self.beta = beta
        self.history = history
        self._losses = np.empty(0)

    def weights(self, losses: ArrayLike, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return f32[n] for ``losses`` f64[n]: 0 for a sample dropped, n / kept for one kept.

        So the mean of weighted losses is the mean over those kept. A loss that is NaN or infinite
        is kept, for the training loop to see, and does not enter the history.
        """
        given = np.asarray(losses, dtype=np.float64)
        if given.ndim != 1:
            raise ConfigError(f"losses have shape {given.shape}: give one per sample")
        finite = np.isfinite(given)
        self._losses = np.concatenate((self._losses, given[finite]))[-self.history :]
        known = np.sort(self._losses)
        share = np.searchsorted(known, given, side="right") / max(len(known), 1)
        kept = (rng.random(len(given)) < share**self.beta) | ~finite
        return (kept * (len(given) / max(int(kept.sum()), 1))).astype(np.float32)

    def state_dict(self) -> dict[str, NDArray[np.float64]]:
        """Return the history, oldest first."""
        return {"losses": self._losses.copy()}

    def load_state_dict(self, state: dict[str, NDArray[np.float64]]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._losses = np.array(state["losses"], dtype=np.float64)[-self.history :]
