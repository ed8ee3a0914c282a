"""ImPACT's evaluations: fresh scores for the samples whose rank moves, or for all."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.importance.baselines import LossHistory
from stoker.scores import MAX_EPOCHS, Scores, counts_up_to, least_of_largest
from stoker.shared import in_parts, scratch


class Hybrid(Scorer):
    """Finds the set S of volatile samples in a warm-up, then has S scored again in each epoch.

    ImPACT (IEEE TC 2025), hybrid importance evaluation. After each epoch every seen sample's
    percentile rank goes into its running variance (Welford). S'_t are the ``|S|`` samples of the
    largest variance, from the second epoch on; ``|S| = share`` of what the cache holds. The
    warm-up, of full passes (``scores.ready`` is False), ends when S' holds still,
    ``|S'_t ∩ S'_{t-1}| / |S| > overlap``, or after ``max_warm_up`` epochs. From then on S stays as
    it is, in ``scores.volatile`` and in :attr:`volatile`, whose samples are to be scored by a
    forward pass before each plan; all others keep the score of their last visit.

    What is ranked is the score that ``of`` writes: the last loss by default, the reducible loss
    as an option (the paper cites Mindermann et al. and leaves this open). State: 18 bytes a
    sample, until S is found. Ranks that hold equal scores find equal sets. Not thread-safe.
    """

    def __init__(
        self,
        num_samples: int,
        cache_samples: int | None = None,
        *,
        of: Scorer | None = None,
        share: float = 0.25,
        overlap: float = 0.8,
        max_warm_up: int = 10,
    ) -> None:
        """Prepare for ids below ``num_samples``.

        ``cache_samples``: how many samples the caches of all nodes hold, each sample in one of
        them; None: as :meth:`cache_holds` tells. Raises ConfigError for a share outside of
        0 < share <= 1, an overlap outside of 0 to 1, a warm-up below 2 epochs, which know no
        variance, and one of more than :data:`~stoker.scores.MAX_EPOCHS`.
        """
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1 sample")
        if not 0 < share <= 1:
            raise ConfigError(f"share={share} is out of range: give 0 < share <= 1 of the cache")
        if not 0 <= overlap <= 1:
            raise ConfigError(f"overlap={overlap} is out of range: give a share of S from 0 to 1")
        if not 2 <= max_warm_up <= MAX_EPOCHS:
            raise ConfigError(
                f"max_warm_up={max_warm_up} is out of range: give 2 to {MAX_EPOCHS} epochs"
            )
        self._cache_samples = cache_samples
        self._of: Scorer = LossHistory() if of is None else of
        self._share, self._overlap, self._max_warm_up = share, overlap, max_warm_up
        self._epoch = -1
        self._num_samples = num_samples
        self._keep_moments(num_samples)
        self._passes = 0
        self._candidates = np.empty(0, np.uint32)
        self._warm = False

    @property
    def needs(self) -> frozenset[Signal]:
        """What the scorer of single samples needs."""
        return self._of.needs

    @property
    def scores_are_losses(self) -> bool:
        """Whether those of single samples are."""
        return self._of.scores_are_losses

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[m]``, S in ascending order; empty during the warm-up."""
        return np.sort(self._candidates) if self._warm else np.empty(0, np.uint32)

    @property
    def rank_variance(self) -> NDArray[np.float64]:
        """``f64[N]``, variance of each sample's percentile rank so far.

        NaN before two ranks, and for all once S is found: it is not needed any more.
        """
        variance: NDArray[np.float64] = scratch(self._num_samples, np.float64)
        variance.fill(np.nan)
        for part in in_parts(len(self._count)):
            variance[part] = self._variance(part)
        return variance

    def cache_holds(self, samples: int) -> None:
        """Note how many samples the caches hold, unless given at construction."""
        if self._cache_samples is None:
            self._cache_samples = samples

    def update(self, scores: Scores, observation: Observation) -> None:
        """Write the scores of the batch; raises what the scorer of single samples does."""
        self._of.update(scores, observation)

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Take the ranks of the last epoch into account; see the class.

        Raises ConfigError for another number of samples, or if ``cache_samples`` is not known.
        """
        if len(scores) != self._num_samples:
            raise ConfigError(f"{len(scores)} scores for a Hybrid of {self._num_samples} samples")
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if not self._warm and scores.seen.any():
            self._add_ranks(scores)
            self._warm = self._holds_still() or self._passes >= self._max_warm_up
            if self._warm:
                self._keep_moments(0)
        scores.ready = self._warm
        scores.set_volatile(self.volatile)

    def _keep_moments(self, num_samples: int) -> None:
        """Begin to count the ranks of so many samples, their mean and squares around it."""
        self._count = scratch(num_samples, np.uint16)
        self._mean = scratch(num_samples, np.float64)
        self._squares = scratch(num_samples, np.float64)

    def _add_ranks(self, scores: Scores) -> None:
        """One step of Welford's running variance for every sample seen so far."""
        is_seen = scores.seen > 0
        seen = None if is_seen.all() else np.flatnonzero(is_seen)
        counts = counts_up_to(scores.values if seen is None else scores.values[seen])
        for part in in_parts(len(counts)):
            rows: slice | NDArray[np.int64] = part if seen is None else seen[part]
            rank = counts[part] / len(counts)
            self._count[rows] += 1
            delta = rank - self._mean[rows]
            self._mean[rows] += delta / self._count[rows]
            self._squares[rows] += delta * (rank - self._mean[rows])
        self._passes += 1

    def _variance(self, part: slice) -> NDArray[np.float64]:
        """Return f64[n], the variance of the ranks of some samples; NaN before two."""
        count = self._count[part]
        known = count >= 2
        return np.where(known, self._squares[part] / np.where(known, count - 1, 1), np.nan)

    def _holds_still(self) -> bool:
        """Choose S'_t, and return whether nearly all of it is in S'_{t-1}."""
        if self._passes < 2:
            return False
        before, size = self._candidates, self._size()
        self._candidates = self._most_variable(size)
        both = np.intersect1d(before, self._candidates, assume_unique=True)
        return len(before) > 0 and len(both) / size > self._overlap

    def _most_variable(self, size: int) -> NDArray[np.uint32]:
        """Return ``u32[size]``, ascending, the samples of the largest variance.

        All of which it is known if these are fewer; of equal ones those that come first.
        """
        variance = self.rank_variance
        is_known = np.isfinite(variance)
        most = min(size, int(np.count_nonzero(is_known)))
        floor, above = least_of_largest(variance, is_known, most)
        del variance, is_known
        ties, chosen = most - above, [np.empty(0, np.int64)]
        for part in in_parts(len(self._count)):
            some = self._variance(part)
            tied = np.flatnonzero(some == floor)
            chosen.append(part.start + np.union1d(np.flatnonzero(some > floor), tied[:ties]))
            ties -= len(tied[:ties])
        return np.concatenate(chosen).astype(np.uint32)

    def _size(self) -> int:
        """|S|, at least one sample and at most all."""
        if self._cache_samples is None:
            raise ConfigError(
                "Hybrid does not know how many samples the cache holds: give cache_samples"
            )
        return min(max(round(self._share * self._cache_samples), 1), self._num_samples)

    def state_dict(self) -> dict[str, NDArray[np.generic]]:
        """Return the running variances, empty once S is found, S', and how far the warm-up is."""
        progress = np.array([self._epoch, self._passes, self._warm], np.int64)
        return {
            "count": self._count.copy(),
            "mean": self._mean.copy(),
            "squares": self._squares.copy(),
            "candidates": self._candidates.copy(),
            "progress": progress,
            "num_samples": np.array(self._num_samples),
        }

    def load_state_dict(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Continue from what :meth:`state_dict` returned; ConfigError for another data set."""
        samples = int(state.get("num_samples", len(state["count"])))
        if samples != self._num_samples:
            raise ConfigError(f"a state of {samples} samples for a Hybrid of {self._num_samples}")
        self._count = np.array(state["count"], np.uint16)
        self._mean = np.array(state["mean"], np.float64)
        self._squares = np.array(state["squares"], np.float64)
        self._candidates = np.array(state["candidates"], np.uint32)
        epoch, passes, warm = np.asarray(state["progress"], np.int64)
        self._epoch, self._passes, self._warm = int(epoch), int(passes), bool(warm)


class Realtime(Scorer):
    """The last loss, and all samples volatile once training has begun.

    What ImPACT (IEEE TC 2025) compares its hybrid evaluation with: the scores are never stale, at
    the price of a forward pass over the whole data set in each epoch. No state beyond the epoch,
    which the next :meth:`begin_epoch` sets again.
    """

    needs: ClassVar[frozenset[Signal]] = LossHistory.needs
    scores_are_losses: ClassVar[bool] = True

    def __init__(self, num_samples: int) -> None:
        """Prepare for ids below ``num_samples``; ConfigError unless it is positive."""
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1 sample")
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
