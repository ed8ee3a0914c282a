"""The cache as a controller of epochs sees it: which samples belong where, and by which keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.bundles import Packager
from stoker.errors import warn_caller
from stoker.importance.base import Neighbours
from stoker.jobs.member import Member
from stoker.jobs.merged import Merged
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.policy.shares import Shares
from stoker.recipes.base import Recipe
from stoker.scores import Scores
from stoker.store.claims import Claims
from stoker.store.store import Store
from stoker.store.tier import NOWHERE, GuardedTier

ON_THEIR_WAY = 2
"""Batches of a process between storage and the step: one is learned from, one comes next."""

_NONE = np.empty(0, np.uint32)


class EpochCache(ABC):
    """Decides when an epoch begins which samples belong where, and follows scores within it.

    :class:`Placing` does so for a real cache, a simulator has its own.
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

    @property
    def wants_plans(self) -> bool:
        """Whether :meth:`foresee` and :meth:`pass_by` are of use."""
        return False

    def foresee(self, ids: NDArray[np.uint32], length: int, *, is_last: bool) -> None:
        """Note the coming accesses ``u32[A]`` of this rank, ``length`` of them in this epoch.

        ``is_last``: there are none after those that are known.
        """

    def pass_by(self, accesses: int) -> None:
        """Note that training has had so many of these."""

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


class PolicyCache(EpochCache):
    """The cache of a store, real or replayed, as a recipe's ``policy`` arranges it.

    ``shares`` divides it. Used by one thread.
    """

    def __init__(self, store: Store, policy: Policy, shares: Shares | None) -> None:
        self._store = store
        self._policy = policy
        self._shares = shares
        self._tier = store.tier
        self._follows_scores = policy.follows_scores
        self._regions = policy.regions()
        self._names = [region.name for region in self._regions]
        self._plan: Plan | None = None
        self._accesses: dict[str, int] = {}
        self._accesses_before: dict[str, int] = {}

    @property
    def follows_scores(self) -> bool:
        """Whether the policy's keys changed with scores when the cache was opened."""
        return self._follows_scores

    @property
    def accesses(self) -> dict[str, int]:
        """Accesses of the whole job by region, in the epoch that began last."""
        return self._accesses

    @property
    def accesses_before(self) -> dict[str, int]:
        """Those of the epoch before it."""
        return self._accesses_before

    def resume(self, accesses: dict[str, int]) -> None:
        """Continue from a saved state with its :attr:`accesses`."""
        self._accesses = accesses

    def may_be_served_by_others(self, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return bool[n]: samples ``u32[n]`` that need not be read for their next access."""
        store = self._store
        if store.substitution is None or store.stand_ins is not None:
            # Stand-ins come and go: the prefetch process sees shortly before who has one.
            return np.zeros(len(ids), np.bool_)
        if store.places is None:
            return np.ones(len(ids), np.bool_)
        return np.asarray(store.places.array[ids] == self._names.index(store.substitution.region))

    def follow(
        self, ids: NDArray[np.uint32], neighbours: Neighbours | None, scores: Scores
    ) -> None:
        """Give samples ``u32[n]`` that were scored just now their new keys.

        The one with most neighbours serves for them from now on, where the recipe says so.
        """
        keys = self._policy.keys(ids, scores, self._plan, None)
        if keys is not None:
            self._tier.set_keys(ids, keys)
        if neighbours is not None:
            self._store.keep_key_sample(neighbours.ids, neighbours.degree, neighbours.of)

    def _divide(self, scores: Scores, plan: Plan, epochs: int | None) -> dict[str, float] | None:
        """Begin the epoch of ``plan``; return the shares of the regions, None to leave them."""
        self._plan = plan
        self._accesses_before = self._accesses
        if self._shares is None:
            return None
        return self._shares.shares(scores, plan.epoch, epochs, dict(self._accesses))

    def _place(
        self, scores: Scores, whole: Plan, are_here: NDArray[np.bool_] | None = None
    ) -> None:
        """Say where samples belong from now on: nowhere, if another node keeps them."""
        places = self._store.places
        if places is None:
            return
        wanted = np.zeros(len(places.array), np.uint8)
        if self._policy.has_places:
            wanted = self._policy.places(scores, whole, len(wanted))
            counts = core.count_kinds(wanted, whole.ids)
            self._accesses = dict(zip(self._names, counts, strict=False))
        if are_here is not None:
            wanted[~are_here] = NOWHERE
        places.array[:] = wanted


class Placing(PolicyCache):
    """What a recipe's policy decides when an epoch begins, and what scores change within it.

    All ranks place samples alike, since policies are pure; one rank per machine arranges the
    cache. Where jobs share it each gives samples their keys, which are those of all jobs, and the
    job that came first divides it and moves samples. A failing cache costs hits, never the run.
    Used by the training process only, from one thread; workers see the places through shared
    memory.

    ``policy`` is the recipe's, as fitted to this job and others; ``shares`` divides the cache, told
    its size; ``member``: this job among those that share the cache. ``rank`` is this process's, and
    ``is_node_leader`` says whether it does what has to be done once per machine.
    """

    _policy: Merged

    def __init__(
        self,
        store: Store,
        policy: Merged,
        shares: Shares | None,
        *,
        rank: int,
        is_node_leader: bool,
        member: Member | None = None,
        packager: Packager | None = None,
    ) -> None:
        super().__init__(store, policy, shares)
        self._tier = GuardedTier(store.tier, lambda: store.counters.add(bypassed=1))
        self._rank = rank
        self._is_node_leader = is_node_leader
        self._member = member
        self._packager = packager
        self._ids = np.arange(len(store.source), dtype=np.uint32)
        self._missed: list[NDArray[np.uint32]] = []

    @property
    def needs_whole(self) -> bool:
        """Whether the plan of the whole epoch decides where samples belong."""
        return self._store.places is not None or self._store.substitution is not None

    @property
    def claims(self) -> Claims | None:
        """Who was served in the epoch, on this machine."""
        return self._store.claims

    # --- epochs ---

    def begin_epoch(
        self,
        scores: Scores,
        plan: Plan,
        whole: Plan,
        epochs: int | None,
        earlier: NDArray[np.uint32],
        are_here: NDArray[np.bool_] | None = None,
    ) -> None:
        """Arrange the cache for an epoch; see :meth:`EpochCache.begin_epoch`."""
        wanted = self._divide(scores, plan, epochs)
        missed = self._take_missed()
        self._place(scores, whole, are_here)
        keys, pool = None, self._store.pool
        if (self._is_node_leader or pool is not None) and not self._policy.natural_keys:
            keys = self._policy.keys(self._ids, scores, plan, None)
        if self._is_node_leader:
            arranges = self._member is None or self._member.arranges
            moves = arranges and self._policy.has_places
            keys_of = None if keys is None else keys.take
            self._store.rearrange(self._regions, keys_of, wanted if arranges else None, moves=moves)
        if pool is not None and keys is not None:
            pool.reorder(keys)  # each rank ranks what it stores; one renews what is there
        self._store.begin_epoch(plan.epoch, self._rank, earlier)
        if self._packager is not None and self._store.places is not None:
            stamp = self._store.stamp
            self._packager.begin_epoch(plan.epoch, stamp, self._store.places, missed)

    @property
    def wants_plans(self) -> bool:
        """Whether there is a pool that keeps what is needed soonest."""
        return self._store.pool is not None and self._store.pool.wants_plans

    def foresee(self, ids: NDArray[np.uint32], length: int, *, is_last: bool) -> None:
        """Tell the pool."""
        if self._store.pool is not None:
            self._store.pool.begin_plan(ids, length, is_last=is_last)

    def pass_by(self, accesses: int) -> None:
        """Tell the pool."""
        if self._store.pool is not None:
            self._store.pool.pass_by(accesses)

    def stats(self) -> dict[str, int]:
        """Return what packaging has counted on this machine."""
        return {} if self._packager is None else self._packager.stats()

    def close(self) -> None:
        """End packaging. May be called again."""
        if self._packager is not None:
            self._packager.close()

    # --- while training ---

    def write_keys(self, scores: Scores) -> None:
        """Rewrite the keys of all cached samples, since jobs that share the cache came or went."""
        if self._is_node_leader and not self._policy.natural_keys:
            keys = self._policy.keys_now(self._ids, scores, self._plan)
            if keys is not None:
                self._store.rearrange(self._regions, keys.take, moves=False)
                if self._store.pool is not None:
                    self._store.pool.reorder(keys)

    def note_missed(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that were asked for and not cached."""
        if self._packager is not None and len(ids):
            self._missed.append(ids)

    # --- inside ---

    def _take_missed(self) -> NDArray[np.uint32]:
        """Return the missed samples of low importance, as far as the places still say so."""
        if self._packager is None or not self._missed:
            return _NONE
        ids, self._missed = np.unique(np.concatenate(self._missed)), []
        return ids[self.may_be_served_by_others(ids)]


def make_packager(
    recipe: Recipe,
    store: Store,
    policy: Merged,
    *,
    region_bytes: int,
    is_bytes_of_source: bool,
    node: int,
    seed: int,
) -> Packager | None:
    """Return what packages samples of low importance, if the recipe has that done and it can be.

    ``region_bytes`` are those that the region of packages has at least; ``node`` keeps apart what
    several nodes build in one place. With ``is_bytes_of_source`` false the cache holds what cannot
    be packaged, which is warned of.

    Raises :class:`~stoker.errors.ConfigError` where packages cannot be kept.
    """
    packaging, substitution = recipe.packaging, recipe.substitution
    arenas = store.tier.arenas
    if packaging is None or substitution is None or store.claims is None or not arenas:
        return None
    if not is_bytes_of_source:
        warn_caller(
            "samples are not packaged, as only bytes of a source can be: leave stage out, "
            "and use a data set of Stoker's in place of wrap()"
        )
        return None
    names = [region.name for region in policy.regions()]
    return Packager(
        store.source,
        arenas[0],
        store.claims.served,
        packaging,
        low=names.index(substitution.region),
        region=substitution.region,
        region_bytes=region_bytes,
        packaged=store.packaged,
        owner=str(node),
        seed=seed,
    )
