"""A static region for the samples that a scorer wants fresh in each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.policy.high_low import HighLow
from stoker.policy.score import score_keys
from stoker.scores import Scores


@dataclass(frozen=True)
class StaticSet(Policy):
    """The cache of ImPACT: H and L as in iCache, and beside them the set S (TC 2025).

    S are the samples whose rank varies most, ``scores.volatile``; they stay cached, because they
    are scored anew before each epoch. While the scorer warms up (``scores.ready`` is False) the
    cache is MinIO: what comes first stays. Raises :class:`~stoker.errors.ConfigError` for a share
    out of range.
    """

    name: ClassVar[str] = "static_set"
    follows_scores: ClassVar[bool] = True
    STATIC: ClassVar[int] = 2

    share: float = 0.25
    """Share of the cache that S has, 0 < share < 1; H and L divide the rest."""
    others: HighLow = field(default_factory=HighLow)
    """What becomes of all other samples."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share={self.share} is refused: give a share, 0 < share < 1")

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
