"""Which samples belong where in the cache, and by which keys they are kept, epoch by epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.plan import Plan
from stoker.pytorch.cached import CachedDataset
from stoker.recipes.base import Recipe
from stoker.scores import Scores
from stoker.shared import SharedArray
from stoker.store.guarded import GuardedTier


class Placing:
    """What a recipe's policy decides when an epoch begins, and what scores change within it.

    ``keeps_house``: whether this rank does what has to be done once per machine. All ranks place
    samples alike, since policies are pure. A failing cache costs hits, never the run. Used by the
    training process only, from one thread; workers see the places through shared memory.
    """

    def __init__(
        self, recipe: Recipe, policy: Any, cached: CachedDataset, *, keeps_house: bool
    ) -> None:
        self.accesses: dict[str, int] = {}
        """Accesses of the whole job by region, in the epoch that began last."""
        self.accesses_before: dict[str, int] = {}
        """Those of the epoch before it."""
        self.places: SharedArray | None = None
        """``u8[N]``: number of the region where each sample belongs; None: all in the first."""
        self._policy = policy
        self._shares = recipe.shares
        self._names = [region.name for region in policy.regions()]
        self._keeps_house = keeps_house
        self._store = cached.store
        self._tier = GuardedTier(
            cached.store.tier, lambda: cached.store.counters.add(bypassed=1), "the cache failed"
        )
        self._ids = np.arange(len(cached), dtype=np.uint32)
        self._plan: Plan | None = None
        if hasattr(policy, "places"):
            self.places = SharedArray.create(len(cached), np.uint8, name="stoker-places")
            self._tier.place_by(self.places)

    def begin_epoch(self, scores: Scores, plan: Plan, whole: Plan, epochs: int | None) -> None:
        """Arrange the cache for an epoch, ``epochs`` there are in all if that is known.

        ``plan`` is what is left of it, and ``whole`` all of it, both of all ranks; ``scores`` are
        those that they were made from.
        """
        self._plan = plan
        self.accesses_before = self.accesses
        if self._shares is not None:
            shares = self._shares.shares(scores, plan.epoch, epochs, dict(self.accesses))
            if self._keeps_house:
                self._tier.resize(shares)
        moved, where = self._place(scores, whole)
        if self._keeps_house:
            self._rekey(scores)
            for number in np.unique(where).tolist():
                ids = moved[where == number]
                self._tier.move(ids, self._names[number], self._keys(ids, scores))

    def follow(self, ids: NDArray[np.uint32], scores: Scores) -> None:
        """Give samples ``u32[n]`` that were scored just now their new keys."""
        keys = self._keys(ids, scores)
        if keys is not None:
            self._tier.set_keys(ids, keys)

    def _place(self, scores: Scores, whole: Plan) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Say where samples belong; return those that belong elsewhere than before, and where."""
        if self.places is None:
            return self._ids[:0], np.empty(0, np.uint8)
        before, now = self.places.array, self._policy.places(scores, whole, len(self._ids))
        moved = np.flatnonzero(before != now).astype(np.uint32)
        before[:] = now
        counts = np.bincount(now[whole.ids], minlength=len(self._names)).tolist()
        self.accesses = dict(zip(self._names, counts, strict=False))
        return moved, now[moved]

    def _rekey(self, scores: Scores) -> None:
        """Give all cached samples the keys that they have at the start of the epoch."""
        if self._policy.natural_keys:
            return
        for arena in getattr(self._store.tier, "arenas", ()):
            ids = self._ids[arena.contains(self._ids)]
            keys = self._keys(ids, scores)
            if keys is not None and len(ids):
                arena.set_keys(ids, keys)

    def _keys(self, ids: NDArray[np.uint32], scores: Scores) -> NDArray[np.float64] | None:
        keys: NDArray[np.float64] | None = self._policy.keys(ids, scores, self._plan, None)
        return keys
