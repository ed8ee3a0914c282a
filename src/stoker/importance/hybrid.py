"""ImPACT's evaluations: fresh scores for the samples whose rank moves, or for all."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.importance.base import Observation, Scorer, Signal
from stoker.importance.baselines import LossHistory
from stoker.scores import Scores, largest, percentiles


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
    as an option (the paper cites Mindermann et al. and leaves this open). State: 20 bytes a
    sample. Ranks that hold equal scores find equal sets. Not thread-safe.
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
        0 < share <= 1, an overlap outside of 0 to 1, and a warm-up below 2 epochs, which know no
        variance.
        """
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1 sample")
        if not 0 < share <= 1:
            raise ConfigError(f"share={share} is out of range: give 0 < share <= 1 of the cache")
        if not 0 <= overlap <= 1:
            raise ConfigError(f"overlap={overlap} is out of range: give a share of S from 0 to 1")
        if max_warm_up < 2:
            raise ConfigError(f"max_warm_up={max_warm_up} is out of range: give 2 epochs or more")
        self._cache_samples = cache_samples
        self._of: Scorer = LossHistory() if of is None else of
        self._share, self._overlap, self._max_warm_up = share, overlap, max_warm_up
        self._epoch = -1
        self._count = np.zeros(num_samples, np.int32)
        self._mean = np.zeros(num_samples)
        self._squares = np.zeros(num_samples)
        self._passes = 0
        self._candidates = np.empty(0, np.uint32)
        self._warm = False

    @property
    def needs(self) -> frozenset[Signal]:
        """What the scorer of single samples needs."""
        return self._of.needs

    @property
    def volatile(self) -> NDArray[np.uint32]:
        """``u32[m]``, S in ascending order; empty during the warm-up."""
        return np.sort(self._candidates) if self._warm else np.empty(0, np.uint32)

    @property
    def rank_variance(self) -> NDArray[np.float64]:
        """``f64[N]``, variance of each sample's percentile rank so far; NaN before two ranks."""
        known = self._count >= 2
        return np.where(known, self._squares / np.where(known, self._count - 1, 1), np.nan)

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
        if len(scores) != len(self._count):
            raise ConfigError(f"{len(scores)} scores for a Hybrid of {len(self._count)} samples")
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if not self._warm and scores.seen.any():
            self._add_ranks(scores)
            self._warm = self._holds_still() or self._passes >= self._max_warm_up
        scores.ready = self._warm
        scores.set_volatile(self.volatile)

    def _add_ranks(self, scores: Scores) -> None:
        """One step of Welford's running variance for every sample seen so far."""
        is_seen = scores.seen > 0
        seen = slice(None) if is_seen.all() else np.flatnonzero(is_seen)
        rank = percentiles(scores.values[seen])
        self._count[seen] += 1
        delta = rank - self._mean[seen]
        self._mean[seen] += delta / self._count[seen]
        self._squares[seen] += delta * (rank - self._mean[seen])
        self._passes += 1

    def _holds_still(self) -> bool:
        """Choose S'_t, and return whether nearly all of it is in S'_{t-1}."""
        if self._passes < 2:
            return False
        before, size = self._candidates, self._size()
        variance = self.rank_variance
        known = np.flatnonzero(~np.isnan(variance))
        top = largest(variance[known], min(size, len(known)))
        self._candidates = known[top].astype(np.uint32)
        both = np.intersect1d(before, self._candidates, assume_unique=True)
        return len(before) > 0 and len(both) / size > self._overlap

    def _size(self) -> int:
        """|S|, at least one sample and at most all."""
        if self._cache_samples is None:
            raise ConfigError(
                "Hybrid does not know how many samples the cache holds: give cache_samples"
            )
        return min(max(round(self._share * self._cache_samples), 1), len(self._count))

    def state_dict(self) -> dict[str, NDArray[np.generic]]:
        """Return the running variances, S' and the progress of the warm-up."""
        progress = np.array([self._epoch, self._passes, self._warm], np.int64)
        return {
            "count": self._count.copy(),
            "mean": self._mean.copy(),
            "squares": self._squares.copy(),
            "candidates": self._candidates.copy(),
            "progress": progress,
        }

    def load_state_dict(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Continue from what :meth:`state_dict` returned; ConfigError for another data set."""
        if state["count"].shape != self._count.shape:
            raise ConfigError(
                f"a state of {len(state['count'])} samples for a Hybrid of {len(self._count)}"
            )
        self._count = np.array(state["count"], np.int32)
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
