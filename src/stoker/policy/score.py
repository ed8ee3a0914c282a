"""Importance: the sample with the lowest score is evicted first, or stood in for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.scores import Scores

TRANSIT = 0.05
"""Share of the cache for what waits for its step, where batches are not known."""
_LEAST_TRANSIT, _MOST_TRANSIT = 0.001, 0.1
_MOST_ACCESSES = 2**29 - 1


def score_keys(ids: NDArray[np.uint32], scores: Scores | None) -> NDArray[np.float64]:
    """Return f64[n]: the latest score of each sample, -inf for one that was never seen.

    Where newcomers must beat their victims, -inf means: only while there is room.
    """
    if scores is None:
        return np.full(len(ids), -np.inf)
    return core.score_keys(scores.values, scores.seen, ids)


def with_frequency(keys: NDArray[np.float64], accesses: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return f64[n], ordered as the pairs of ``keys`` f64[n] and ``accesses`` i[n], 0 or more.

    The key counts in single precision: that leaves 29 bits below it, which hold the accesses.
    """
    coarse = keys.astype(np.float32).astype(np.float64) + 0.0  # which leaves no -0
    bits, below = coarse.view(np.int64), np.minimum(accesses, _MOST_ACCESSES)
    # Of negative numbers the one with the larger bits is the smaller one.
    pairs = np.where(coarse < 0, bits - below, bits + below).view(np.float64)
    return np.where(np.isfinite(coarse), pairs, coarse)


@dataclass(frozen=True)
class Score(Policy):
    """SHADE's adaptive priority-aware prediction (APP), Algorithm 1 (Khan et al., FAST 2023).

    While there is room every sample enters. When the cache is full, a sample that was missed
    enters only if it was seen before (the paper's ghost cache; here the table of scores) and its
    score is no less than the smallest cached one, which is evicted. Scores in the logarithm of a
    rank often tie, and ties enter. A score that changes moves the key at once.

    The paper's queue entries are <importance, frequency>: of samples with equal scores the one
    accessed less is evicted. With ``frequency`` that is so here; a newcomer is compared by the
    pair too, as in the authors' public code. Accesses are counted where scores are written
    (``scores.seen``), whether or not a sample was cached. Without it, and where both are equal, a
    fixed order decides that is unrelated to the ids (:func:`~stoker.store.arena.turns_of`), so
    that no class folder is favoured.

    ``ties=False`` is the stricter rule of iCache's H-cache (Chen et al., HPCA 2023, Algorithm 1).
    """

    name: ClassVar[str] = "score"
    follows_scores: ClassVar[bool] = True

    ties: bool = True
    """Whether a sample enters whose score equals the smallest cached one."""
    frequency: bool = False
    """Whether equal scores are ordered by how often samples were accessed."""

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by score, whose newcomers must beat their victims."""
        return (Region("main", 1.0, admission="beats_victims", ties=self.ties),)

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: the scores, and accesses below them; -inf for samples never seen."""
        keys = score_keys(ids, scores)
        if scores is None or not self.frequency:
            return keys
        return with_frequency(keys, scores.seen.take(ids))


@dataclass(frozen=True)
class Homophily(Policy):
    """The cache of SpiderCache: importance and homophily regions, exclusive (ICPP 2025).

    A sample enters ``importance`` while there is room, or if its score is above the smallest
    cached one. Samples that are not admitted pass through ``transit``, a short queue, because only
    after the step is it known which sample of the batch has most neighbours: that key sample moves
    on to ``homophily``, a queue, and serves for its neighbours (:meth:`Store.keep_key_sample`).

    Raises :class:`~stoker.errors.ConfigError` for shares out of range.
    """

    name: ClassVar[str] = "homophily"
    follows_scores: ClassVar[bool] = True
    overflow: ClassVar[str] = "transit"

    importance: float = 0.9
    """Share of the importance region of what the two large ones have, 0 < importance < 1."""
    transit: float | None = None
    """Share of the cache for what waits for its step, 0 < transit < 1; None: what
    :meth:`for_batches` finds, and :data:`TRANSIT` without. With fewer bytes than all batches on
    their way to the step have, key samples are lost before they are known."""

    def __post_init__(self) -> None:
        for name, share in (("importance", self.importance), ("transit", self.transit)):
            if share is not None and not 0 < share < 1:
                raise ConfigError(f"{name}={share} is out of range: give a share, 0 < {name} < 1")

    def regions(self) -> tuple[Region, ...]:
        """Importance by score, homophily and transit as queues."""
        transit = TRANSIT if self.transit is None else self.transit
        rest = 1 - transit
        return (
            Region("importance", self.importance * rest, admission="beats_victims", ties=False),
            Region("homophily", (1 - self.importance) * rest, order="insertion"),
            Region("transit", transit, order="insertion"),
        )

    def for_batches(self, share: float) -> Homophily:
        """Return the policy with room for all these batches in transit, a tenth at most.

        The paper has no such region, and more of it costs hits. A ``transit`` that was given stays.
        """
        if self.transit is not None:
            return self
        return replace(self, transit=min(max(share, _LEAST_TRANSIT), _MOST_TRANSIT))

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: the scores, -inf for samples never seen; the queues do without."""
        return score_keys(ids, scores)
