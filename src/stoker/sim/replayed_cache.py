"""The cache of a replay: production arena, store and packaging, over samples without bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from stoker.bundles import Packaging
from stoker.epoch.placing import EpochCache
from stoker.importance.base import Neighbours
from stoker.jobs.merged import Merged
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.recipes import Recipe
from stoker.recipes.cache import fit_packages, fit_shares, follow, make_store
from stoker.scores import Scores
from stoker.sim.accounting import AccountingArena
from stoker.sim.blank_source import BlankSource
from stoker.sim.packages import Packages
from stoker.source.packed import Packed
from stoker.store import MemoryTier, Store
from stoker.store.claims import Served
from stoker.store.guarded import NullTier
from stoker.store.tier import Keys, RegionTier
from stoker.types import Outcome

_PACKAGES = 500  # of all bytes together, at most: each takes as long as thousands of samples
_LARGEST_PACKAGE = 1 << 28

_OUTCOMES = np.array([Outcome.FETCHED, Outcome.HIT], np.int8)

Outcomes = NDArray[np.int8]
"""How samples were served, ``i8[n]``, :class:`~stoker.types.Outcome`."""


class ReplayedCache(EpochCache):
    """What the Loader builds around a recipe's policy, in one process and without storage.

    ``share``: cache bytes / bytes of all samples, 0 to 1. Between :meth:`begin_epoch` and the next
    one :meth:`serve` batches, and :meth:`follow` their scores. Also a context manager. Used by one
    thread. ``beside``: the cache of the job that came first, whose memory is used; it divides it,
    and closes it. ``wrap`` makes the policy of the recipe's.

    Raises :class:`~stoker.errors.ConfigError` for a cache too small for a package.
    """

    def __init__(
        self,
        recipe: Recipe,
        sizes: NDArray[np.int64],
        share: float,
        seed: int,
        *,
        beside: ReplayedCache | None = None,
        wrap: Callable[[Policy], Policy] = lambda policy: policy,
    ) -> None:
        self.policy = wrap(recipe.policy.for_sizes(sizes))
        """The policy, told the sizes of the samples if it asks for them."""
        self._follows = self.policy.follows_scores
        self._arranges = beside is None
        self._regions = self.policy.regions()
        self._names = [region.name for region in self._regions]
        self._data_bytes = int(sizes.sum())
        self.capacity = round((1.0 if recipe.preload else share) * self._data_bytes)
        self._recipe, self._seed = fit_packages(recipe, self.capacity), seed
        self._num_samples = len(sizes)
        self._time = 0.0
        self._reads_told = 0
        self._plan: Plan | None = None
        self._counts: dict[str, int] = {}
        source = BlankSource(sizes)
        self._arena = self._make_arena(source) if self.capacity and beside is None else None
        if beside is not None:
            self._arena = beside._arena
        self._store = self._make_store(source)
        self._shares = recipe.shares
        self._packages = self._make_packages(source)
        if recipe.preload:
            self._store.tier.put_many(self._ids(), _no_bytes(len(sizes)))

    # --- epochs ---

    @property
    def follows_scores(self) -> bool:
        """Whether the policy's keys changed with scores when this job was alone."""
        return self._follows

    def begin_epoch(
        self,
        scores: Scores,
        plan: Plan,
        whole: Plan,
        epochs: int | None,
        earlier: NDArray[np.uint32],
        are_here: NDArray[np.bool_] | None = None,
    ) -> None:
        """Arrange the cache for a whole epoch of one rank, which is ``plan``."""
        if isinstance(self.policy, Merged):
            self.policy.begin_plan(plan, len(plan))
        self._plan = plan
        store = self._store
        wanted = None
        if self._shares is not None:
            wanted = self._shares.shares(scores, plan.epoch, epochs, self._counts)
        if store.places is not None:
            count = self._num_samples
            places = self.policy.places(scores, plan, count)
            store.places.array[:] = places
            counts = np.bincount(places[plan.ids], minlength=len(self._names)).tolist()
            self._counts = dict(zip(self._names, counts, strict=True))
        keys = None if self.policy.natural_keys else self._set_keys(scores, plan)
        if self._arranges:
            store.rearrange(self._regions, keys, wanted)
        store.begin_epoch(plan.epoch, rank_seed=self._seed)
        if self._packages is not None and store.places is not None:
            self._packages.begin_epoch(plan.epoch, store.stamp, store.places.array)

    def end_epoch(self) -> None:
        """Let go of the plan, so that the next one has its memory."""
        self._plan = None

    @property
    def serves_runs(self) -> bool:
        """Whether batches may be served by :meth:`serve_run`: none but what is asked for is."""
        return self._recipe.substitution is None and self._arena is not None

    def serve_run(self, ids: NDArray[np.uint32], keys: Keys, after: Keys, batch: int) -> Outcomes:
        """Serve a run of batches ``u32[n]`` in one call; return its outcomes ``i8[n]``.

        As :meth:`serve` for each, with the keys ``f64[n]`` where the policy has any, and then the
        keys ``after`` it (``f64[n]``) where scores change them.
        """
        assert self._arena is not None
        places = self._store.places
        hits = self._arena.replay(
            ids,
            keys,
            after=after,
            regions=None if places is None else places.array[ids],
            entrance=self._names[0],
            overflow=self.policy.overflow,
            at_once=batch,
        )
        outcomes: Outcomes = _OUTCOMES.take(hits)
        return outcomes

    def serve(self, ids: NDArray[np.uint32], keys: Keys) -> Served:
        """Serve a batch ``u32[n]``, with the keys ``f64[n]`` after it where the policy has any."""
        # A search for substitutes looks at all samples: 50 an epoch are enough of them.
        self._time += 0.1 * len(ids) / self._num_samples
        served = self._store.serve(ids, keys)
        if self._packages is not None:
            missed = (served.ids != ids) | (served.outcomes == Outcome.FETCHED)
            self._packages.note_missed(ids[missed])
            self._packages.work()
        return served

    def follow(
        self, ids: NDArray[np.uint32], neighbours: Neighbours | None, scores: Scores
    ) -> None:
        """Give samples ``u32[n]`` that were scored just now their new keys."""
        store = self._store
        follow(self.policy, self._plan, store, store.tier, ids, neighbours, scores)

    @property
    def package_reads(self) -> int:
        """Packages read so far, of the size that the recipe gives them."""
        packaging = self._recipe.packaging
        if self._packages is None or packaging is None:
            return 0
        each = _package_bytes(packaging, self._data_bytes) / packaging.min_bytes
        return round(self._packages.stats()["package_reads"] * each)

    def take_package_reads(self) -> tuple[int, float]:
        """Return the packages read since the last call, and bytes of one of them."""
        taken, self._reads_told = self.package_reads - self._reads_told, self.package_reads
        packaging = self._recipe.packaging
        return taken, 0.0 if packaging is None else float(packaging.min_bytes)

    def close(self) -> None:
        """Let go of the cache's memory."""
        if self._arranges:
            self._store.close()

    def __enter__(self) -> ReplayedCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ---

    def _set_keys(self, scores: Scores, plan: Plan) -> NDArray[np.float64] | None:
        """Give what is cached its keys for ``plan``.

        Return them, ``f64[N]`` with 0 for the others, where samples move by them.
        """
        if self._arena is None:
            return None
        held = np.flatnonzero(self._arena.contains(self._ids())).astype(np.uint32)
        own = self.policy.keys(held, scores, plan, None)
        assert own is not None
        self._arena.set_keys(held, own)
        if self._store.places is None:
            return None
        keys = np.zeros(self._num_samples)
        keys[held] = own
        return keys

    def _ids(self) -> NDArray[np.uint32]:
        return np.arange(self._num_samples, dtype=np.uint32)

    def _make_arena(self, source: BlankSource) -> AccountingArena:
        arena = AccountingArena(source.sizes, self.capacity, seed=self._seed)
        arena.configure(self._regions)
        return arena

    def _make_store(self, source: BlankSource) -> Store:
        tier: RegionTier = NullTier()
        if self._arena is not None:
            overflow = self.policy.overflow
            first = next(iter(self._arena.stats()["regions"]))
            tier = MemoryTier(self._arena, first, regions=self._names, overflow=overflow)
        return make_store(self._recipe, self.policy, source, tier, clock=lambda: self._time)

    def _make_packages(self, source: BlankSource) -> Packages | None:
        packaging, substitution = self._recipe.packaging, self._recipe.substitution
        store, arena = self._store, self._arena
        if packaging is None or substitution is None or arena is None:
            return None
        assert store.claims is not None
        assert store.packaged is not None
        coarse = replace(packaging, min_bytes=_package_bytes(packaging, self._data_bytes))
        fitted = replace(self._recipe, packaging=coarse)
        self._shares, _ = fit_shares(fitted, self.capacity, source.sizes)
        return Packages(
            source,
            arena,
            store.claims.served,
            store.packaged,
            coarse,
            low=self._names.index(substitution.region),
            region=substitution.region,
            seed=self._seed,
        )


def _no_bytes(count: int) -> Packed:
    """Return so many samples of no bytes."""
    return Packed(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))


def _package_bytes(packaging: Packaging, data_bytes: int) -> int:
    """Return the least bytes of a replay's packages: large data sets have coarser ones."""
    return max(packaging.min_bytes, min(data_bytes // _PACKAGES, _LARGEST_PACKAGE))
