"""The cache of a replay, and what reads ahead into it: production code, and samples of no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import BatchSpec
from stoker.epoch.placing import (
    ON_THEIR_WAY,
    PolicyCache,
)
from stoker.epoch.planner import Cursor
from stoker.epoch.rank_share import RankShare
from stoker.epoch.read_ahead import with_window
from stoker.jobs.merged import Merged
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.prefetch.reading import WINDOW, put_read
from stoker.prefetch.walk import Blocks, Group, Marks, Progress, Segment, Walk
from stoker.recipes import Recipe
from stoker.recipes.base import fit, make_store
from stoker.scores import Scores
from stoker.shared import scratch
from stoker.sim.blank import AccountingArena, BlankSource, Packages, Swaps, no_bytes
from stoker.store import MemoryTier
from stoker.store.claims import Served
from stoker.store.store import Store
from stoker.store.substitutes import ByNeighbour, OnceEach
from stoker.store.tier import Keys, NullTier, RegionTier
from stoker.types import Outcome

_PACKAGES = 500  # of all bytes together, at most: each takes as long as thousands of samples,
# so that large data sets have coarser ones
_LARGEST_PACKAGE = 1 << 28
_GROUP = 32  # samples that are read ahead at once
_AT_ONCE = 4  # groups under way: with more of them, storage that is short gives no more

_NONE = np.empty(0, np.uint32)
_FETCHED, _HIT = np.int8(Outcome.FETCHED), np.int8(Outcome.HIT)

Outcomes = NDArray[np.int8]
"""How samples were served, ``i8[n]``, :class:`~stoker.types.Outcome`."""


class ReplayedCache(PolicyCache):
    """What the Loader builds around a recipe's policy, in one process and without storage.

    ``share``: cache bytes / bytes of all samples, 0 to 1. Between :meth:`begin_epoch` and the next
    one :meth:`serve` batches, and :meth:`follow` their scores. Also a context manager. Used by one
    thread. ``window``: bytes on top of the cache for samples that are read ahead (see
    :class:`ReplayedAhead`). ``beside``: the cache of the job that came first, whose memory is used;
    it divides it, and closes it. ``wrap`` makes the policy of the recipe's. ``batch_size``: samples
    of a batch.

    Raises :class:`~stoker.errors.ConfigError` for a cache too small for a package.
    """

    def __init__(
        self,
        recipe: Recipe,
        sizes: NDArray[np.int64],
        share: float,
        seed: int,
        *,
        batch_size: int = 1,
        window: int = 0,
        beside: ReplayedCache | None = None,
        wrap: Callable[[Policy], Policy] = lambda policy: policy,
    ) -> None:
        data_bytes = int(sizes.sum())
        self.capacity = round((1.0 if recipe.preload else share) * data_bytes)
        """Payload bytes."""
        policy = recipe.policy.for_sizes(sizes)
        if self.capacity:
            on_their_way = ON_THEIR_WAY * batch_size * data_bytes / len(sizes)
            policy = policy.for_batches(on_their_way / self.capacity)
        self.policy = wrap(policy)
        """The policy, told of samples and batches if it asks for them."""
        self.sizes = sizes
        """``i64[N]``, bytes of each sample."""
        self._arranges = beside is None
        self.window = window if self.capacity and beside is None else 0
        """Bytes on top of the cache for what is read ahead."""
        self._num_served = 0
        self._reads_told = self._builds_told = 0
        self._arena: AccountingArena | None = None
        regions = self.policy.regions()
        if beside is not None:
            self._arena = beside._arena
        elif self.capacity:
            self._arena = AccountingArena(sizes, self.capacity + self.window, seed=seed)
            self._arena.configure(with_window(regions, self.capacity, self.window))
        tier = self._tier_over(self._arena, [region.name for region in regions])
        coarse = min(data_bytes // _PACKAGES, _LARGEST_PACKAGE)
        fitted = fit(recipe, self.capacity, sizes, least_package=coarse)
        source, self._recipe = BlankSource(sizes), fitted.recipe
        store = make_store(fitted.recipe, self.policy, source, tier, clock=self._time)
        super().__init__(store, self.policy, fitted.shares)
        self._package_bytes = 0
        if recipe.packaging is not None:
            self._package_bytes = recipe.packaging.fitted(self.capacity).min_bytes
        self._seed = seed
        self._packages = self._make_packages(source)
        self._swaps: Swaps | None = None
        if recipe.preload:
            tier.put_many(self._ids(), no_bytes(len(sizes)))

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
        """Arrange the cache for a whole epoch of one rank, which is ``plan``."""
        if isinstance(self.policy, Merged):
            self.policy.begin_plan(plan, len(plan))
        store, wanted = self._store, self._divide(scores, plan, epochs)
        self._place(scores, plan)
        store.rearrange(
            self._regions,
            None if self.policy.natural_keys else partial(self._keys, scores, plan),
            wanted if self._arranges else None,
            moves=self._arranges,
        )
        store.begin_epoch(plan.epoch, rank_seed=self._seed)
        if self._packages is not None and store.places is not None:
            self._packages.begin_epoch(plan.epoch, store.stamp, store.places.array)

    def end_epoch(self) -> None:
        """Let go of what the epoch needed, so that the next plan has its memory."""
        self._plan = self._swaps = None

    @property
    def serves_runs(self) -> bool:
        """Whether the epoch's batches may be served by :meth:`serve_run`.

        That is where none but what is asked for can be: without substitution, or with one for
        samples of a place that none has, as in the warm-up of ImPACT.
        """
        if self._arena is None or self.window:
            return False
        rules, places = self._recipe.substitution, self._store.places
        if rules is None:
            return True
        if places is None or not rules.has_places:
            return False
        return not (places.array == self._names.index(rules.region)).any()

    @property
    def serves_stand_ins(self) -> bool:
        """Whether batches may be served by :meth:`serve_batch`: key samples are what stands in.

        A policy whose keys change with what is served, and not with scores, needs :meth:`serve`.
        """
        has_rules = self._store.stand_ins is not None and self.follows_scores
        return has_rules and self._arena is not None and not self.window

    @property
    def store(self) -> Store:
        """What serves batches."""
        return self._store

    @property
    def memory(self) -> MemoryTier:
        """The tier over the arena, where there is one."""
        assert isinstance(self._store.tier, MemoryTier)
        return self._store.tier

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
        self._num_served += len(ids)
        if self._packages is not None:
            self._packages.note_missed(ids[~hits])
        return np.where(hits, _HIT, _FETCHED)

    @property
    def swaps_runs(self) -> bool:
        """Whether batches may be served by :meth:`serve_swaps`: others stand in, once an epoch.

        With keys that are scores, where what stands in for others has none.
        """
        policy, rules = self.policy, self._recipe.substitution
        if self._arena is None or self.window or rules is None:
            return False
        by_key = {region.name for region in policy.regions() if region.order == "key"}
        apart = rules.has_places and by_key.isdisjoint({rules.region, policy.overflow})
        has_keys = policy.natural_keys or (policy.keys_are_scores and apart)
        return has_keys and isinstance(self._store.substitutes, OnceEach)

    def begin_swaps(self) -> None:
        """Prepare for the runs of the epoch that was begun; its plan repeats no sample."""
        store, packages, rules = self._store, self._packages, self._recipe.substitution
        assert store.claims is not None
        assert rules is not None
        self._swaps = Swaps(
            store.claims.served.array,
            scratch(len(self.sizes), np.uint32),
            store.claims.stamp,
            store.places.array if rules.has_places and store.places is not None else None,
            self._names.index(rules.region),
        )
        if packages is not None and store.packaged is not None:
            self._swaps.packaged, self._swaps.room = store.packaged.array, packages.lacking

    def serve_swaps(
        self, ids: NDArray[np.uint32], keys: Keys, after: Keys, batch: int
    ) -> tuple[NDArray[np.uint32], Outcomes]:
        """Serve a run of batches ``u32[n]`` in one call; return who was served, and how.

        As :meth:`serve` for each, with the keys ``f64[n]`` before it and then those ``after`` it.
        From :meth:`begin_swaps` on.
        """
        swaps, before, chooser = self._swaps, self._num_served, self._store.substitutes
        assert self._arena is not None
        assert isinstance(chooser, OnceEach)
        assert swaps is not None

        def search(begun: int) -> NDArray[np.uint32]:
            self._num_served = before + begun
            found = chooser.offer(swaps.stamp)
            swaps.candidates = _NONE if found is None else found
            return swaps.candidates

        served, outcomes = self._arena.replay_once_each(
            ids,
            swaps,
            search,
            None if self._packages is None else self._bring_packages,
            keys=keys,
            after=after,
            entrance=self._names[0],
            overflow=self.policy.overflow,
            at_once=batch,
        )
        self._num_served = before + len(ids)
        return served, outcomes

    def note_swaps(
        self, ids: NDArray[np.uint32], served: NDArray[np.uint32], outcomes: Outcomes
    ) -> None:
        """Note what a run of :meth:`serve_swaps` missed, before the next epoch; in any thread."""
        if self._packages is not None:
            self._packages.note_missed(ids.compress((served != ids) | (outcomes == _FETCHED)))

    def _bring_packages(self, served: NDArray[np.uint32]) -> int:
        assert self._packages is not None
        self._packages.note_low(served)
        return self._packages.lacking

    def serve_batch(
        self, plan: Plan, start: int, end: int, scores: Scores
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Serve the batch of ``plan`` from ``start`` to ``end`` in one call, while scores are so.

        As :meth:`serve`, where :attr:`serves_stand_ins`. Return what was served, ``u32[n]``, and
        whether it was cached.
        """
        store, ids = self._store, plan.ids[start:end]
        assert self._arena is not None
        assert store.stand_ins is not None and store.substitution is not None
        keys: Keys | Scores = scores
        if not self.policy.keys_are_scores:
            keys = self.policy.keys(ids, scores, plan, np.arange(start, end))
        self._num_served += len(ids)
        return self._arena.replay_batch(
            ids,
            keys,
            store.stand_ins.serves.array,
            store.substitution.region,
            regions=None if store.places is None else store.places.array[ids],
            entrance=self._names[0],
            overflow=self.policy.overflow,
        )

    def serve(self, ids: NDArray[np.uint32], keys: Keys) -> Served:
        """Serve a batch ``u32[n]``, with the keys ``f64[n]`` after it where the policy has any."""
        self._num_served += len(ids)
        served = self._store.serve(ids, keys)
        if self._packages is not None:
            fetched = served.outcomes == _FETCHED
            self._packages.note_missed(ids[(served.ids != ids) | fetched])
            self._packages.note_served(served.ids[~fetched])  # what was read made no room
        return served

    @property
    def package_reads(self) -> int:
        """Packages read so far, of the size that the recipe gives them."""
        packaging = self._recipe.packaging
        if self._packages is None or packaging is None:
            return 0
        each = packaging.min_bytes / self._package_bytes
        return round(self._packages.stats()["package_reads"] * each)

    def take_package_reads(self) -> tuple[int, float]:
        """Return the reads for packages since the last call, and bytes of one of them.

        Those of packages, and of the samples that they were built of.
        """
        if self._packages is None:
            return 0, 0.0
        built = self._packages.stats()["rebuild_reads"]
        loads, builds = self.package_reads - self._reads_told, built - self._builds_told
        self._reads_told, self._builds_told = self.package_reads, built
        num_bytes = loads * self._package_bytes + builds * float(self.sizes.mean())
        return loads + builds, num_bytes / max(1, loads + builds)

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

    def _keys(self, scores: Scores, plan: Plan, ids: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Return the keys ``f64[n]`` that samples have as ``plan`` begins."""
        keys = self.policy.keys(ids, scores, plan, None)
        assert keys is not None
        return keys

    def _time(self) -> float:
        """Return the seconds that searches for substitutes are spaced by.

        Each looks at all samples: 50 an epoch are enough of them.
        """
        return 0.1 * self._num_served / len(self.sizes)

    def _ids(self) -> NDArray[np.uint32]:
        return np.arange(len(self.sizes), dtype=np.uint32)

    def _tier_over(self, arena: AccountingArena | None, names: list[str]) -> RegionTier:
        """Return the tier over the arena."""
        if arena is None:
            return NullTier()
        first, overflow = next(iter(arena.stats()["regions"])), self.policy.overflow
        return MemoryTier(arena, first, regions=names, overflow=overflow)

    def _make_packages(self, source: BlankSource) -> Packages | None:
        packaging, substitution = self._recipe.packaging, self._recipe.substitution
        store, arena = self._store, self._arena
        if packaging is None or substitution is None or arena is None:
            return None
        assert store.claims is not None
        assert store.packaged is not None
        return Packages(
            source,
            arena,
            store.claims.served,
            store.packaged,
            packaging,
            low=self._names.index(substitution.region),
            region=substitution.region,
            seed=self._seed,
        )


class ReplayedAhead:
    """Reads what a plan needs next into the cache's window, as far as there is room.

    It takes the steps of :class:`~stoker.prefetch.fetcher.Fetcher` over the same
    :class:`~stoker.prefetch.walk.Walk`, for one rank. Groups are asked for as soon as the window
    has room for them, each with the rest of its blocks. They come in that order, once storage had
    time for them; those that the due batch needs in any case, and before what a worker reads.
    ``cache`` was made with a window. Used by one thread.
    """

    def __init__(self, cache: ReplayedCache, share: RankShare) -> None:
        store, self._tier = cache.store, cache.memory
        self._cache, self._share = cache, share
        self._arena = self._tier.arena
        self._fresh = store.expect_prefetch()[0].array
        self._walk = Walk(cache.sizes, cache.window, self._arena.capacity_bytes)
        self._progress = Progress(share.most_accesses)
        self.num_read = 0
        """Samples read so far: some twice, if they were evicted before their access."""
        self._published: list[int] = []
        self._ready: deque[Group] = deque()
        self._under_way: deque[Group] = deque()
        self._are_coming = np.zeros(len(cache.sizes), np.bool_)
        self._given = 0.0  # samples that storage had time for and that are not read
        self._due = self._handed_out = 0  # accesses, counted since the walk began
        self._waiting = 0  # of the batch that comes next, those that were read ahead
        self._by_neighbour: ByNeighbour | None = None
        if store.stand_ins is not None and store.substitution is not None:
            region = store.substitution.region
            self._by_neighbour = ByNeighbour(self._tier, region, store.stand_ins)

    def begin(self, at: Cursor, more: bool, *, hold: bool = False) -> None:
        """Begin an epoch; ``more``: continue into the next one."""
        if at.epoch not in self._published:
            self._publish(at)
        if more and at.epoch + 1 not in self._published:
            self._publish(Cursor(at.epoch + 1))

    def go_on(self) -> None:
        """Do nothing: an epoch is never held back here."""

    def follow(self, plan: Plan, done: int) -> None:
        """Do nothing: no other job shares the cache."""

    def read(self, ids: NDArray[np.uint32], samples: float) -> NDArray[np.bool_]:
        """Read what there is room for, the batch ``ids`` (``u32[n]``) that is served next first.

        ``samples`` is how many more storage can have given by now; it may be infinite. Return
        ``bool[n]``: what of the batch was read ahead.
        """
        self._let_go(self._walk.advance())
        self._given += samples
        self._due += len(ids)
        self._ask()
        while self._under_way and self._has_come(ids):
            self._receive()
            self._ask()
        if not self._under_way:  # the window is full, and storage idles
            self._given = min(self._given, 0.0)
        self._waiting = int(self._fresh[np.unique(ids)].sum())
        are_ahead: NDArray[np.bool_] = self._fresh[ids] == 1
        return are_ahead

    def served(self, spec: BatchSpec, epoch: int, fetched: int) -> None:
        """Note that a batch was served, and how many samples of it had to be fetched."""
        alone = fetched - self._waiting  # what workers read themselves
        # Storage gives what was asked for before, and the batch waits: that takes up room.
        while alone > 0 and self._under_way:
            self._receive()
        self._progress.finish(epoch, spec.first, len(spec.ids))
        self._given -= alone

    def _publish(self, at: Cursor) -> None:
        coming = self._share.upcoming(at)
        marks = Marks(self._progress.begin(at.epoch).array)
        self._progress.leave_out(at.epoch, self._cache.may_be_served_by_others(coming.ids))
        blocks = None if coming.blocks is None else Blocks(coming.blocks, coming.before)
        segment = Segment(at.epoch, coming.ids, coming.keys, marks, marks.generation, blocks)
        self._walk.add(segment)
        self._published = [*self._published[-1:], at.epoch]

    def _let_go(self, position: int) -> None:
        """Give up what was read ahead for accesses before ``position``."""
        self._arena.release(position - 1)
        while self._ready and self._ready[0].position < position:
            self._tier.drop_from(WINDOW, self._ready.popleft().ids)

    def _ask(self) -> None:
        """Ask for as many groups as may be under way and as the window has room for."""
        while len(self._under_way) < _AT_ONCE and (group := self._walk.take(_GROUP)) is not None:
            self._handed_out = group.position + 1
            if group.ids.size:
                self._bring(group)

    def _has_come(self, ids: NDArray[np.uint32]) -> bool:
        """Whether storage had time for the next group, or the due batch ``ids`` waits for more."""
        is_awaited = self._handed_out < self._due or bool(self._are_coming[ids].any())
        return is_awaited or self._given >= len(self._under_way[0].ids)

    def _bring(self, group: Group) -> None:
        """Keep what is cached of the group, and ask for the rest."""
        arena = self._arena
        self._ready.append(group)
        wanted = group if group.is_near else group.part(~arena.contains(group.ids))
        if not arena.lease(wanted.ids, group.position):
            return
        is_cached = arena.contains(wanted.ids)
        missing, cached = wanted.part(~is_cached), wanted.ids[is_cached]
        shared = cached[arena.copies(cached, WINDOW) > 0]
        if self._by_neighbour is not None:
            missing = missing.part(~self._by_neighbour.key_samples(missing.ids)[1])
        self._walk.keep_room_for(np.concatenate([missing.ids, shared]))
        if missing.ids.size:
            once = missing.part(np.sort(np.unique(missing.ids, return_index=True)[1]))
            self._read(once.with_neighbours(arena.contains))

    def _read(self, group: Group) -> None:
        own: NDArray[np.bool_] = self._tier.claim(group.ids)
        if own.any():
            self._under_way.append(group.part(own))
            self._are_coming[group.ids[own]] = True

    def _receive(self) -> None:
        """Put the next group that is under way into the cache."""
        group = self._under_way.popleft()
        kept = put_read(self._tier, group, no_bytes(len(group.ids)))
        self._are_coming[group.ids] = False
        self._fresh[group.ids[kept]] = 1
        self._given -= len(group.ids)
        self.num_read += len(group.ids)
