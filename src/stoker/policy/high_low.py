"""iCache's two regions, important samples and the others, and ImPACT's third one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.policy.score import score_keys
from stoker.scores import Scores

Split = Literal["fixed", "moving"]


@dataclass(frozen=True)
class HighLow(Policy):
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
    follows_scores: ClassVar[bool] = True
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
        places = np.full(num_samples, self.HIGH, np.uint8)
        seen = scores.seen[:num_samples] > 0
        if not scores.ready or not seen.any():
            return places
        if self.split == "moving":
            return self._places_of_all(scores.values[:num_samples], seen)
        # In the order of the plan, which is random, so that ties favour no sample.
        selected = plan.ids[np.sort(np.unique(plan.ids, return_index=True)[1])]
        known = selected[seen[selected]]
        unseen = len(selected) - len(known)
        wanted = max(0, round(self.h_share * len(selected)) - unseen)
        ranked = known[np.argsort(-scores.values[known], kind="stable")]
        floor = scores.values[ranked[wanted - 1]] if wanted > 0 else np.inf
        places[seen & (scores.values[:num_samples] <= floor)] = self.LOW
        places[selected[seen[selected]]] = self.LOW
        places[ranked[:wanted]] = self.HIGH
        return places

    def _places_of_all(
        self, values: NDArray[np.float64], seen: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Return u8[N] by rank among all samples; of equal scores at the edge all are HIGH."""
        known = values[seen]
        wanted = max(0, round(self.h_share * len(values)) - (len(values) - len(known)))
        floor = np.inf
        if wanted:
            floor = np.partition(known, len(known) - wanted)[len(known) - wanted]
        return np.where(seen & (values < floor), self.LOW, self.HIGH).astype(np.uint8)

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: the scores, -inf for samples never seen; L does without."""
        return score_keys(ids, scores)


@dataclass(frozen=True)
class StaticSet(Policy):
    """The cache of ImPACT: H and L as in iCache, and the set S (TC 2025).

    S are the samples whose rank varies most, ``scores.volatile``; they stay cached, because they
    are scored again before each epoch. While the scorer warms up (``scores.ready`` is False) the
    cache is MinIO: what comes first stays. Raises :class:`~stoker.errors.ConfigError` for a share
    out of range.
    """

    name: ClassVar[str] = "static_set"
    follows_scores: ClassVar[bool] = True
    STATIC: ClassVar[int] = 2

    share: float = 0.25
    """Share of the cache that S has, 0 < share < 1; H and L divide the rest."""
    others: HighLow = field(default_factory=HighLow)
    """The policy for all other samples."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share={self.share} is out of range: give a share, 0 < share < 1")

    def regions(self) -> tuple[Region, ...]:
        """H and L, and S, which does not evict."""
        rest = 1 - self.share
        others = [
            Region(**{**vars(region), "share": region.share * rest})
            for region in self.others.regions()
        ]
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
        return score_keys(ids, scores if scores is not None and scores.ready else None)
