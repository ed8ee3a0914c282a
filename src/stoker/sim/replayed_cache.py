"""The cache of a replay: production arena, store and packaging, over samples without bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from stoker._core import Arena as Core
from stoker._core import segment_bytes
from stoker.bundles import Packaging
from stoker.bundles.depot import Pieces
from stoker.bundles.job import FIELDS, Flags, Job, Totals
from stoker.bundles.workshop import Epoch, Loaded, Workshop
from stoker.epoch.placing import (
    ON_THEIR_WAY,
    EpochCache,
    follow,
    may_be_served_by_others,
)
from stoker.epoch.read_ahead import with_window
from stoker.errors import CapacityError, ConfigError
from stoker.importance.base import Neighbours
from stoker.jobs.merged import Merged
from stoker.node.memory import read_memory
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.recipes import Recipe
from stoker.recipes.cache import fit, make_store
from stoker.scores import Scores
from stoker.shared import SharedArray
from stoker.source.base import BaseSource, PackedRead, Source, check_ids
from stoker.source.packed import Offsets, Packed, unpack
from stoker.store import MemoryTier
from stoker.store.arena import Arena, Samples
from stoker.store.claims import Served
from stoker.store.store import Store
from stoker.store.tier import Ids, Keys, Mask, NullTier, RegionTier
from stoker.types import Outcome, format_bytes

_PACKAGES = 500  # of all bytes together, at most: each takes as long as thousands of samples,
# so that large data sets have coarser ones
_LARGEST_PACKAGE = 1 << 28

_OUTCOMES = np.array([Outcome.FETCHED, Outcome.HIT], np.int8)

Outcomes = NDArray[np.int8]
"""How samples were served, ``i8[n]``, :class:`~stoker.types.Outcome`."""


class ReplayedCache(EpochCache):
    """What the Loader builds around a recipe's policy, in one process and without storage.

    ``share``: cache bytes / bytes of all samples, 0 to 1. Between :meth:`begin_epoch` and the next
    one :meth:`serve` batches, and :meth:`follow` their scores. Also a context manager. Used by one
    thread. ``window``: bytes on top of the cache for samples that are read ahead (see
    :class:`~stoker.sim.ahead.ReplayedAhead`). ``beside``: the cache of the job that came first,
    whose memory is used; it divides it, and closes it. ``wrap`` makes the policy of the recipe's.
    ``batch_size``: samples of a batch.

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
        self._follows = self.policy.follows_scores
        self._arranges = beside is None
        self._regions = self.policy.regions()
        self._names = [region.name for region in self._regions]
        self.window = window if self.capacity and beside is None else 0
        """Bytes on top of them for what is read ahead."""
        self._time = 0.0
        self._reads_told = 0
        self._plan: Plan | None = None
        self._counts: dict[str, int] = {}
        self._arena: AccountingArena | None = None
        if beside is not None:
            self._arena = beside._arena
        elif self.capacity:
            self._arena = AccountingArena(sizes, self.capacity + self.window, seed=seed)
            self._arena.configure(with_window(self._regions, self.capacity, self.window))
        tier = self._tier()
        coarse = min(data_bytes // _PACKAGES, _LARGEST_PACKAGE)
        fitted = fit(recipe, self.capacity, sizes, least_package=coarse)
        source, self._recipe, self._shares = BlankSource(sizes), fitted.recipe, fitted.shares
        self._store = make_store(fitted.recipe, self.policy, source, tier, clock=lambda: self._time)
        self._package_bytes = 0
        if recipe.packaging is not None:
            self._package_bytes = recipe.packaging.fitted(self.capacity).min_bytes
        self._seed = seed
        self._packages = self._make_packages(source)
        if recipe.preload:
            tier.put_many(self._ids(), no_bytes(len(sizes)))

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
            count = len(self.sizes)
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
        return self._recipe.substitution is None and self._arena is not None and not self.window

    @property
    def store(self) -> Store:
        """What serves batches."""
        return self._store

    @property
    def memory(self) -> MemoryTier:
        """The tier over the arena, where there is one."""
        assert isinstance(self._store.tier, MemoryTier)
        return self._store.tier

    def may_be_served_by_others(self, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return bool[n]: samples ``u32[n]`` that need not be read for their next access."""
        return may_be_served_by_others(self._store, self._names, ids)

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
        self._time += 0.1 * len(ids) / len(self.sizes)
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
        each = packaging.min_bytes / self._package_bytes
        return round(self._packages.stats()["package_reads"] * each)

    def take_package_reads(self) -> tuple[int, float]:
        """Return the packages read since the last call, and bytes of one of them."""
        taken, self._reads_told = self.package_reads - self._reads_told, self.package_reads
        return taken, float(self._package_bytes)

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
        keys = np.zeros(len(self.sizes))
        keys[held] = own
        return keys

    def _ids(self) -> NDArray[np.uint32]:
        return np.arange(len(self.sizes), dtype=np.uint32)

    def _tier(self) -> RegionTier:
        """Return the tier over the arena."""
        if self._arena is None:
            return NullTier()
        first, overflow = next(iter(self._arena.stats()["regions"])), self.policy.overflow
        return MemoryTier(self._arena, first, regions=self._names, overflow=overflow)

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


def no_bytes(count: int) -> Packed:
    """Return so many samples of no bytes."""
    return Packed(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))


class AccountingArena(Arena):
    """An :class:`~stoker.store.arena.Arena` that counts the bytes of samples and has none of them.

    ``lengths`` (``i64[N]``): bytes of each sample, whatever is put; what is read is empty. Of an
    array that repeats one element (``np.broadcast_to``) it keeps that one. Orders,
    admission, regions and budgets are those of any arena, since it is the same code; eviction is
    exact. About 40 bytes of memory a sample. It is used by one thread at a time. Raises
    :class:`~stoker.errors.ConfigError` for lengths below 0 and
    :class:`~stoker.errors.CapacityError` when the memory is not there.
    """

    def __init__(self, lengths: NDArray[np.int64], capacity_bytes: int, *, seed: int = 0) -> None:
        if not len(lengths) or int(lengths.min()) < 0 or capacity_bytes < 0:
            raise ConfigError(
                f"capacity_bytes={capacity_bytes} and {len(lengths)} lengths are invalid: give "
                "0 bytes or more, for one sample at least"
            )
        is_one = lengths.strides == (0,)
        self._lengths = np.ascontiguousarray(lengths[:1] if is_one else lengths, np.int64)
        mean = max(1, round(float(lengths.mean())))
        needed = segment_bytes(len(lengths), capacity_bytes, mean, False, True)
        available = read_memory().available
        if needed > available:
            raise CapacityError(
                f"accounting for {len(lengths)} samples takes {format_bytes(needed)} of memory, "
                f"and {format_bytes(available)} are free here: replay fewer samples"
            )
        self._core = Core.create(len(lengths), capacity_bytes, mean, "", True, seed, True)

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples = (),
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> NDArray[np.bool_]:
        """Offer samples ``u32[n]`` of their known lengths; see :meth:`Arena.put_many`."""
        order = None if keys is None else np.ascontiguousarray(keys, np.float64)
        return self._core.put_lengths(self._ids(ids), self._lengths, order, region, overflow)

    def replay(
        self,
        ids: Ids,
        keys: Keys = None,
        *,
        after: Keys = None,
        regions: NDArray[np.uint8] | None = None,
        entrance: str = "main",
        overflow: str = "",
        at_once: int = 1,
    ) -> Mask:
        """Make accesses ``u32[n]``, ``at_once`` in a batch; return ``bool[n]``, which ones hit.

        Of each batch, all samples are got, those found are given their ``keys`` (``f64[n]``), and
        those missed are put with theirs. With ``after`` (``f64[n]``), ``keys`` are for puts only,
        and the samples of a batch have these keys when it is over. Of several misses of a sample in
        one batch the first counts, the others hit. ``regions`` (``u8[n]``, as indices): where each
        goes if it is put; else to ``entrance``; what is not admitted goes to ``overflow``.

        The same as :meth:`get_many`, :meth:`set_keys`, :meth:`claim` and :meth:`put_many`, batch
        after batch, at ten times the speed. Raises :class:`~stoker.errors.ConfigError` for ids and
        regions out of range, and for lengths that differ.
        """
        return self._core.replay(
            self._ids(ids), self._lengths, keys, after, regions, entrance, overflow, at_once
        )


class BlankSource(BaseSource):
    """Samples ``sizes`` (``i64[N]``) bytes long, and empty when they are read. Thread-safe.

    For an :class:`~stoker.sim.replayed_cache.AccountingArena`, which knows how long they are.

    Raises :class:`~stoker.errors.ConfigError` for ids out of range.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes = sizes.view()
        self._sizes.flags.writeable = False

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._sizes

    @property
    def sizes_are_exact(self) -> bool:
        """Whether samples are as long as they are said to be: none of these is."""
        return False

    @property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        return hashlib.blake2b(np.ascontiguousarray(self._sizes).data, digest_size=16).hexdigest()

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return nothing for each of ``ids``."""
        data, offsets, _ = self.read_packed(ids)
        return unpack(data, offsets)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return samples of no bytes; there are never errors."""
        count = len(check_ids(ids, len(self)))
        return np.empty(0, np.uint8), np.zeros(count + 1, np.int64), {}


class MemoryDepot:
    """Packages in memory; see :class:`~stoker.bundles.depot.Depot`. For one thread."""

    def __init__(self) -> None:
        self._packages: dict[str, bytes] = {}

    def names(self) -> list[str]:
        """Return the packages."""
        return list(self._packages)

    def publish(self, name: str, pieces: Pieces) -> None:
        """Put a package there."""
        self._packages[name] = b"".join(pieces)

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes; FileNotFoundError if it is not there."""
        if name not in self._packages:
            raise FileNotFoundError(name)
        view = memoryview(self._packages[name])
        return view if num_bytes < 0 else view[:num_bytes]

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages; those that are not there are passed over."""
        for name in names:
            self._packages.pop(name, None)

    def close(self) -> None:
        """Forget all packages."""
        self._packages.clear()


class Packages:
    """Packs and loads without delay: an upper bound of what the packaging process achieves.

    Arguments are those of :class:`~stoker.bundles.Packager`. Used by one thread.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        served: SharedArray,
        packaged: SharedArray,
        settings: Packaging,
        *,
        low: int,
        region: str,
        seed: int,
    ) -> None:
        self._low = low
        self._totals = np.zeros(len(FIELDS))
        flags, totals = Flags(len(source)), Totals()
        flags.join(packaged.array)
        totals.join(self._totals)
        job = Job(
            source,
            arena.handle,
            region,
            low,
            served,
            Path(),  # nothing is written: packages are in memory
            True,
            "0",
            settings.min_bytes,
            seed,
            "0",
        )
        self._workshop = Workshop(job, arena, MemoryDepot(), flags, totals)
        self._missed = np.zeros(len(source), np.bool_)

    def begin_epoch(self, epoch: int, stamp: int, places: NDArray[np.uint8]) -> None:
        """Repack for ``epoch``, from which on ``stamp`` marks what is served."""
        low = places == self._low
        self._workshop.begin(Epoch(epoch, stamp, low), self._missed & low)
        self._missed = np.zeros_like(self._missed)
        self.work()

    def note_missed(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that were asked for and not cached."""
        self._missed[ids] = True

    def work(self) -> None:
        """Build and load as long as there is room for a package."""
        while True:
            built = self._workshop.build()
            loaded = self._workshop.load()
            if not built and loaded in (None, Loaded.NO_ROOM, Loaded.TOO_LARGE):
                return

    def stats(self) -> dict[str, int]:
        """Return the counts of :meth:`stoker.bundles.Packager.stats`."""
        return dict(zip(FIELDS, self._totals.astype(np.int64).tolist(), strict=True))
