"""Importance: the sample with the lowest score is evicted first, in one region or in several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.scores import Scores, least_of_largest
from stoker.shared import in_parts, scratch

TRANSIT = 0.05
"""Share of the cache for what waits for its step, where batches are not known."""
Split = Literal["fixed", "moving"]

_LEAST_TRANSIT, _MOST_TRANSIT = 0.001, 0.1
_MOST_ACCESSES = 2**29 - 1


class ByScore(Policy):
    """What all policies of this page have: keys that are scores, each the sample's own."""

    follows_scores: ClassVar[bool] = True

    @property
    def keys_are_scores(self) -> bool:
        """Whether no more counts than the score."""
        return True

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: the latest score of each sample, -inf for one that was never seen.

        Where newcomers must beat their victims, -inf means: only while there is room. Queues do
        without keys.
        """
        if scores is None:
            return np.full(len(ids), -np.inf)
        return core.score_keys(scores.values, scores.seen, ids)


@dataclass(frozen=True)
class Score(ByScore):
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

    ties: bool = True
    """Whether a sample enters whose score equals the smallest cached one."""
    frequency: bool = False
    """Whether equal scores are ordered by how often samples were accessed."""

    @property
    def keys_are_scores(self) -> bool:
        """Whether accesses do not count."""
        return not self.frequency

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
        keys = super().keys(ids, scores, plan, position)
        if scores is None or not self.frequency:
            return keys
        return with_frequency(keys, scores.seen.take(ids))


@dataclass(frozen=True)
class Homophily(ByScore):
    """The cache of SpiderCache: importance and homophily regions, exclusive (ICPP 2025).

    A sample enters ``importance`` while there is room, or if its score is above the smallest
    cached one. Samples that are not admitted pass through ``transit``, a short queue, because only
    after the step is it known which sample of the batch has most neighbours: that key sample moves
    on to ``homophily``, a queue, and serves for its neighbours (:meth:`Store.keep_key_sample`).

    Raises :class:`~stoker.errors.ConfigError` for shares out of range.
    """

    name: ClassVar[str] = "homophily"
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


@dataclass(frozen=True)
class HighLow(ByScore):
    """The H-cache and the L-cache of iCache (Chen et al., HPCA 2023).

    The H-list of an epoch are the most important of its selected samples. H keeps them by score:
    one enters when there is room, or if its score is above the smallest cached one (Algorithm 1).
    L keeps other samples while it has room and evicts nothing by itself: the packager that
    fills it removes what was served.

    With ``split="fixed"`` the H-list is the same share of every plan, and so of all accesses. With
    ``"moving"`` it is that share of all samples, whichever of them an epoch selects: selection
    favours important samples, so that more of a selective epoch's accesses are H's than of a full
    pass's. The paper leaves open what the list is a share of; both are our readings.

    Raises :class:`~stoker.errors.ConfigError` for shares out of range and an unknown split.
    """

    name: ClassVar[str] = "high_low"
    HIGH: ClassVar[int] = 0
    LOW: ClassVar[int] = 1

    h_share: float = 0.7
    """Share of the selected samples, or of all, that are on the H-list, 0 < h_share <= 1."""
    start: float = 0.9
    """Share of the cache that H has in the beginning, 0 < start < 1."""
    split: Split = "fixed"
    """Whether the H-list is a share of the plan (``fixed``) or of all samples (``moving``)."""

    def __post_init__(self) -> None:
        if not 0 < self.h_share <= 1:
            raise ConfigError(
                f"h_share={self.h_share} is out of range: give a share, 0 < h_share <= 1"
            )
        if not 0 < self.start < 1:
            raise ConfigError(f"start={self.start} is out of range: give a share, 0 < start < 1")
        if self.split not in get_args(Split):
            raise ConfigError(
                f"split={self.split!r} is not known: use one of {', '.join(get_args(Split))}"
            )

    def regions(self) -> tuple[Region, ...]:
        """H, ordered by score, and L, which does not evict."""
        return (
            Region("H", self.start, admission="beats_victims", ties=False),
            Region("L", 1 - self.start, order="insertion", admission="while_room"),
        )

    def places(self, scores: Scores, plan: Plan, num_samples: int) -> NDArray[np.uint8]:
        """Return u8[N]: :attr:`HIGH` for the H-list of ``plan``, :attr:`LOW` for the rest.

        Samples never seen are HIGH, because their worth is not known yet. So are samples that
        the plan leaves out although they outrank the H-list: they must not stand in for others.
        While the scorer is not ready all are HIGH.
        """
        seen = scores.seen[:num_samples] > 0
        if not scores.ready or not seen.any():
            return np.full(num_samples, self.HIGH, np.uint8)
        if self.split == "moving":
            return self._places_of_all(scores.values[:num_samples], seen)
        return self._places_of_plan(scores, plan, seen)

    def _places_of_plan(
        self, scores: Scores, plan: Plan, seen: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Return u8[N] by rank among the samples of ``plan``."""
        visited, values = plan.visited(len(seen)), scores.values[: len(seen)]
        selected = int(np.count_nonzero(visited))
        is_known = np.logical_and(visited, seen, out=visited)
        known = int(np.count_nonzero(is_known))
        wanted = min(max(0, round(self.h_share * selected) - (selected - known)), known)
        floor, above = least_of_largest(values, is_known, wanted)
        places = self._low_where(seen, values, lambda scores: scores <= floor)
        if wanted > above:
            tied = np.logical_and(is_known, values == floor, out=is_known)
            places[_first(plan, tied, wanted - above)] = self.HIGH
        return places

    def _places_of_all(
        self, values: NDArray[np.float64], seen: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Return u8[N] by rank among all samples; of equal scores at the edge all are HIGH."""
        known = int(np.count_nonzero(seen))
        wanted = max(0, round(self.h_share * len(values)) - (len(values) - known))
        floor, _ = least_of_largest(values, seen, wanted)
        return self._low_where(seen, values, lambda scores: scores < floor)

    def _low_where(
        self,
        seen: NDArray[np.bool_],
        values: NDArray[np.float64],
        is_low: Callable[[NDArray[np.float64]], NDArray[np.bool_]],
    ) -> NDArray[np.uint8]:
        """Return u8[N], made some at a time, which leaves nothing behind."""
        places: NDArray[np.uint8] = scratch(len(values), np.uint8)
        for part in in_parts(len(values)):
            low = seen[part] & is_low(values[part])
            np.multiply(low, np.uint8(self.LOW), out=places[part])  # HIGH is 0
        return places


@dataclass(frozen=True)
class StaticSet(ByScore):
    """The cache of ImPACT: H and L as in iCache, and the set S (TC 2025).

    S are the samples whose rank varies most, ``scores.volatile``; they stay cached, because they
    are scored again before each epoch. While the scorer warms up (``scores.ready`` is False) the
    cache is MinIO: what comes first stays. Raises :class:`~stoker.errors.ConfigError` for a share
    out of range.
    """

    name: ClassVar[str] = "static_set"
    STATIC: ClassVar[int] = 2

    share: float = 0.25
    """Share of the cache that S has, 0 < share < 1; H and L divide the rest."""
    others: HighLow = field(default_factory=HighLow)
    """The policy for all other samples."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share={self.share} is out of range: give a share, 0 < share < 1")

    @property
    def keys_are_scores(self) -> bool:
        """False, for the sake of the warm-up."""
        return False

    def regions(self) -> tuple[Region, ...]:
        """H and L, and S, which does not evict."""
        rest = 1 - self.share
        others = (replace(region, share=region.share * rest) for region in self.others.regions())
        static = Region("S", self.share, order="insertion", admission="while_room")
        return (*others, static)

    def places(self, scores: Scores, plan: Plan, num_samples: int) -> NDArray[np.uint8]:
        """Return u8[N]: :attr:`STATIC` for S, else as :meth:`HighLow.places`."""
        places = self.others.places(scores, plan, num_samples)
        if scores.ready:
            places[scores.volatile[:num_samples]] = self.STATIC
        return places

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: the scores; -inf for samples never seen, and for all in the warm-up."""
        ready = scores if scores is not None and scores.ready else None
        return super().keys(ids, ready, plan, position)


def _first(plan: Plan, chosen: NDArray[np.bool_], count: int) -> NDArray[np.uint32]:
    """Return u32[n], the first ``count`` of the ``chosen`` samples (``bool[N]``) that come in plan.

    Its order is random, so that ties favour no sample.
    """
    every = np.flatnonzero(chosen).astype(np.uint32)
    if len(every) <= count:
        return every
    found = [every[:0]]
    for part in in_parts(len(plan)):
        some = plan.ids[part]
        some = some[chosen[some]]
        if not plan.is_once_each:
            some = some[np.sort(np.unique(some, return_index=True)[1])]
        found.append(some[:count])
        chosen[found[-1]] = False
        count -= len(found[-1])
        if not count:
            break
    return np.concatenate(found)


def with_frequency(keys: NDArray[np.float64], accesses: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return f64[n], ordered as the pairs of ``keys`` f64[n] and ``accesses`` i[n], 0 or more.

    The key counts in single precision: that leaves 29 bits below it, which hold the accesses.
    """
    coarse = keys.astype(np.float32).astype(np.float64) + 0.0  # which leaves no -0
    bits, below = coarse.view(np.int64), np.minimum(accesses, _MOST_ACCESSES)
    # Of negative numbers the one with the larger bits is the smaller one.
    pairs = np.where(coarse < 0, bits - below, bits + below).view(np.float64)
    return np.where(np.isfinite(coarse), pairs, coarse)
