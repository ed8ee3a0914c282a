"""The cache as a controller of epochs sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.importance.base import Neighbours
from stoker.plan import Plan
from stoker.scores import Scores
from stoker.store.claims import Claims


class EpochCache(ABC):
    """Decides when an epoch begins which samples belong where, and follows scores within it.

    :class:`~stoker.epoch.placing.Placing` does so for a real cache, a simulator has its own.
    """

    @property
    def follows_scores(self) -> bool:
        """Whether :meth:`follow` is to be called for samples that were scored."""
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether the plan of the whole epoch decides where samples belong."""
        return False

    @property
    def claims(self) -> Claims | None:
        """Who was served in the epoch; None where samples are not served for one another."""
        return None

    @property
    def accesses(self) -> dict[str, int]:
        """Accesses of the whole job by region, in the epoch that began last."""
        return {}

    @property
    def accesses_before(self) -> dict[str, int]:
        """Those of the epoch before it."""
        return {}

    def resume(self, accesses: dict[str, int]) -> None:
        """Continue from a saved state with its :attr:`accesses`."""

    @abstractmethod
    def begin_epoch(
        self,
        scores: Scores,
        plan: Plan,
        whole: Plan,
        epochs: int | None,
        earlier: NDArray[np.uint32],
        are_here: NDArray[np.bool_] | None = None,
    ) -> None:
        """Arrange the cache for an epoch; there are ``epochs`` in all, if that is known.

        ``plan`` is what is left of it, and ``whole`` all of it, both of all ranks; ``scores`` are
        those that they were made from. ``earlier`` (``u32[n]``) are no substitutes any more: what
        was served before, and what ranks of other nodes take. With several nodes ``are_here``
        (``bool[N]``) are the samples that this node is to keep.
        """

    def end_epoch(self) -> None:
        """Let go of what was needed for the epoch in progress only."""

    def write_keys(self, scores: Scores) -> None:
        """Rewrite the keys of all cached samples, since jobs that share the cache came or went."""

    def note_missed(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that were asked for and not cached."""

    def follow(
        self, ids: NDArray[np.uint32], neighbours: Neighbours | None, scores: Scores
    ) -> None:
        """Give samples ``u32[n]`` that were scored just now their new keys."""

    def stats(self) -> dict[str, Any]:
        """Return counts for :class:`~stoker.epoch.stats.Stats`, by name."""
        return {}
