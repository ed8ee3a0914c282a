"""From a Cache to a Store: how large, under which key, kept by which policy."""

from __future__ import annotations

import logging
import math
import os
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stoker.epoch.cached import CachedSamples
from stoker.epoch.ranks import Agree, Ranks
from stoker.epoch.read_ahead import with_window
from stoker.epoch.settings import Cache, Population
from stoker.epoch.stage import Samples, make_stage
from stoker.errors import (
    CapacityError,
    ConfigError,
    SegmentError,
    StokerError,
    redacted,
    warn_caller,
)
from stoker.jobs.board import JobTable
from stoker.jobs.member import Member, token_of
from stoker.jobs.merged import Merged
from stoker.jobs.partition import Partition
from stoker.jobs.protocol import capacity_allowed, check_disk, tell_opened
from stoker.node.bandwidth import FetchShare
from stoker.policy.base import Region
from stoker.pool.pool_tier import plan_pool
from stoker.prefetch.reading import WINDOW
from stoker.recipes import as_recipe
from stoker.recipes.base import Recipe, SamplerFactory, fit, make_store
from stoker.sampler.homes import Homes
from stoker.sampler.super_epochs import Room
from stoker.store.arena import Arena
from stoker.store.claims import Claims
from stoker.store.disk import Wanted, plan_disk
from stoker.store.fill import preload
from stoker.store.memory_tier import MemoryTier
from stoker.store.registry import SharedArena, SharedArrays, open_arena, open_arrays
from stoker.store.stacked import StackedTier
from stoker.store.substitutes import StandIns
from stoker.store.tier import NullTier, RegionTier
from stoker.types import format_bytes, parse_bytes

log = logging.getLogger("stoker")


class CacheSetup:
    """A cache as the user asked for it, checked, not opened yet.

    Raises :class:`~stoker.errors.ConfigError` for sizes and stages that make no sense; a cache
    of 0 bytes switches caching off, and any other must hold the largest sample. A recipe that
    preloads has room for everything, whatever ``cache.memory`` says.
    """

    def __init__(
        self,
        dataset: Samples,
        population: Population,
        cache: Cache,
        recipe: Recipe,
    ) -> None:
        self.cache = cache
        self.dataset = dataset
        self.population = population
        self.stage = make_stage(dataset, cache.stage)
        sizes = self.stage.source.sizes
        self.policy = Merged(recipe.policy.for_sizes(sizes), sizes)
        """The policy, told the sizes of the samples if it asks for them, and other jobs."""
        self.member: Member | None = None
        """This job among those that share the cache, once it is open; None: it is alone."""
        self.partition: Partition | None = None
        """This job's part of the memory, once it is open; None: there is one order for all."""
        self._fetch_share: FetchShare | None = None  # by the quota that the operator gave it
        if cache.sharing.by_weight and (len(self.policy.regions()) > 1 or cache.disk is not None):
            raise ConfigError(
                f"Sharing(by_weight=True) needs a recipe with one region, which {recipe.name!r} "
                "may not be, and no disk cache: leave by_weight or disk out, or use 'foresight'"
            )
        sizes = population.sizes(self.stage.source.sizes)
        self.data_bytes = int(sizes.sum())
        """Payload bytes of the samples that are visited, as they are cached; an estimate where
        sizes are."""
        self.mean_size = self.data_bytes / len(sizes)
        originals = self.stage.originals
        whole = self.data_bytes
        if originals is not None:
            whole = int(population.sizes(originals.sizes).sum())
        self._whole_bytes = whole  # what shares are shares of
        asked = parse_bytes(cache.memory, of=whole, name="cache")
        self._largest = largest = int(np.max(sizes))
        if 0 < asked < largest and not recipe.preload:
            raise ConfigError(
                f"cache={cache.memory!r} is {asked} bytes and the largest sample has {largest}: "
                "give it more, or switch it off with cache=0"
            )
        everything = math.ceil(self.data_bytes * self.stage.headroom)
        self.capacity = everything if recipe.preload else min(asked, everything)
        """Payload bytes to reserve: what was asked for, but no more than all samples need."""
        self.recipe, self.shares, self.least_low = fit(
            recipe, self.capacity, self.stage.source.sizes
        )
        """What divides the cache, told its size, and the payload bytes that the region of packages
        has at least, where there is one."""
        is_whole = len(population) == population.num_samples and not population.label
        breaks = dataset.source.breaks if is_whole else np.empty(0, np.int64)
        self._room = Room(sizes, self.capacity, breaks)
        self.key = self.stage.key
        """Under which the cache is shared; final once it is open."""
        self._local_identity = dataset.source.local_identity
        wanted = Wanted(
            self.stage.key,
            population.num_samples,
            self.data_bytes,
            whole,
            everything,
            largest,
            self.mean_size,
            self._local_identity,
        )
        is_private = self.stage.is_private
        # Servers keep samples by id, so that one visited part of a data set may help another.
        files = dataset.source if self.stage.is_bytes_of_source else None
        self._pool = plan_pool(cache.pool, cache.pool_size, wanted, files, is_private=is_private)
        on_disk = replace(wanted, key=self.name_of(self.stage.key))
        self._disk = plan_disk(cache.disk, cache.disk_size, on_disk, is_private=is_private)

    def sampler_for(self, capacity: int | None) -> SamplerFactory:
        """Return what makes the sampler for a cache of so many bytes; None: for this one."""
        room = self._room if capacity is None else replace(self._room, capacity=capacity)
        return self.recipe.sampler_for(room)

    def cache_samples(self, num_nodes: int) -> int:
        """Return how many samples of mean size so many nodes hold, if each sample has one home."""
        if not self.mean_size:
            return 0
        return min(round(num_nodes * self.capacity / self.mean_size), len(self.population))

    def homes(self, num_nodes: int) -> Homes:
        """Return which of so many nodes keeps which sample; each has a cache like this one.

        The same for all jobs: they may share the caches.
        """
        every = self.population.num_samples
        never_evicts = all(region.admission == "while_room" for region in self.policy.regions())
        if not never_evicts or self._disk is not None:
            return Homes(every, num_nodes)
        visited = np.zeros(every, np.bool_)
        visited[self.population.ids(np.arange(len(self.population)))] = True
        sizes = np.where(visited, self.stage.source.sizes, 0)  # others take up no room
        return Homes(every, num_nodes, sizes=sizes, capacity=self.capacity)

    def open(
        self,
        ranks: Ranks,
        agree: Agree,
        window: int = 0,
        *,
        has_homes: bool = False,
        accesses: int = 0,
        token: int = 0,
    ) -> CachedSamples:
        """Return the data set served through the cache, which other jobs may have open already.

        ``agree`` asks rank 0. ``window``: bytes on top of the cache for samples that were read
        ahead. ``has_homes``: not all samples are to be kept on this node. ``accesses``: those of
        all ranks in the longest epoch. ``token``: what the job's ranks are known by to other jobs
        that find the cache; 0: to none.

        Raises :class:`~stoker.errors.CapacityError` when the memory is not there, and
        :class:`~stoker.errors.SourceUnavailable` for a storage that gives up while preloading.
        """
        opened: list[SharedArena] = []
        if self.capacity:
            opened.append(self._open_arena(ranks, agree, window))
        own = token or token_of(ranks.world_size, self.key)
        try:
            if self.cache.sharing.by_weight and opened and opened[0].shared:
                self._take_part(opened[0].arena, own)
            disk = self._open_disk()
            if disk is not None:
                opened.append(disk)
            together = self._open_together(ranks, agree, accesses)
        except BaseException:
            for arena in opened:
                arena.close()
            raise
        if token and self.capacity and opened[0].shared and not self.stage.is_private:
            self.member = self._join(opened[0].arena, token)
        claims = stand_ins = None
        if together is not None and "served" in together.arrays:
            claims = Claims(together)
        elif together is not None:
            stand_ins = StandIns(**together.arrays)
        store = make_store(
            self.recipe,
            self.policy,
            self.stage.source,
            self._tier(opened),
            has_places=has_homes,
            claims=claims,
            stand_ins=stand_ins,
            originals=self.stage.originals,
            fetch_share=self._fetch_share or FetchShare(own, self.cache.sharing.weight),
        )
        if self._pool is not None:
            are_times = self.policy.looks_ahead
            store.pool = self._pool.open(renews=ranks.rank == 0, takes_keys=not are_times)
        if self.member is not None:
            self.member.counted = store.totals
        shared: list[SharedArena | SharedArrays] = [*opened]
        if together is not None:
            shared.append(together)
        cached = CachedSamples(self.dataset, store, self.stage, shared)
        if self.recipe.preload:
            self._fill(cached)
        return cached

    def _open_together(self, ranks: Ranks, agree: Agree, accesses: int) -> SharedArrays | None:
        """Return what ranks of this machine write together: who was served, or stands for whom."""
        substitution = self.recipe.substitution
        if substitution is None:
            return None
        # Ranks that cannot agree raise when the epoch begins.
        job = agree(uuid.uuid4().hex, ranks)
        num_samples = self.population.num_samples
        layout = StandIns.layout(num_samples)
        if substitution.has_claims:
            layout = Claims.layout(num_samples, accesses)
        return open_arrays(f"claims {job}", layout, share=ranks.world_size > 1 and job is not None)

    def _fill(self, cached: CachedSamples) -> None:
        """Bring all visited samples in, uncounted; the ranks of a node share the work."""
        every = np.arange(len(self.population), dtype=np.int64)
        try:
            ids = np.unique(self.population.ids(every))
            preload(self.stage.source, cached.store.tier, ids, pool=cached.store.pool)
        except BaseException:
            cached.close()
            raise
        self.stage.forget_reads()

    def _open_disk(self) -> SharedArena | None:
        """Return the disk cache; None, with a warning, if it is in use elsewhere or damaged."""
        try:
            if self._disk is None:
                return None
            limit = self._disk.announce(partial(check_disk, job=self._job, data=self._name))
            opened = self._disk.open(self.policy.regions(), limit_bytes=limit)
            tell_opened()
            return opened
        except SegmentError as error:
            message = f"there will be no disk cache: {error}"
            warn_caller(message)
            return None

    def _take_part(self, arena: Arena, token: int) -> None:
        """Take this job's part of the arena; it goes without, with a log line, if that fails."""
        inode, (region,) = os.fstat(arena.handle.fds[0]).st_ino, self.policy.regions()
        try:
            weight = self.cache.sharing.weight
            self.partition = Partition(f"{self.key} {inode}", arena, region, token, weight)
        except (StokerError, OSError) as error:
            log.info("this job has no part of its own of the cache: %s", error)

    def _join(self, arena: Arena, token: int) -> Member | None:
        """Join the jobs that share the cache; None, and training continues, if that fails."""
        inode = os.fstat(arena.handle.fds[0]).st_ino
        try:
            table = JobTable(f"{self.key} {inode}", self.population.num_samples)
        except (StokerError, OSError) as error:
            log.info("other jobs at this cache are not known: %s", error)
            return None
        return Member(
            table,
            self.policy,
            self.cache.sharing,
            token=token,
            name=f"{self.recipe.name} {os.getpid()}",
            partition=self.partition,
        )

    def _tier(self, opened: list[SharedArena]) -> RegionTier:
        """Return the tier over what was opened: memory, the disk, both, or nothing."""
        if not opened:
            return NullTier()
        # Of the arena, not of our policy: it may be another job's.
        names = [region.name for region in self.policy.regions()]
        overflow = self.policy.overflow
        if self.partition is not None:
            own = self.partition.region
            return MemoryTier(opened[0].arena, own, regions=[own], overflow=overflow)
        tiers = [
            MemoryTier(
                shared.arena,
                next(iter(shared.arena.stats()["regions"])),
                regions=names,
                overflow=overflow,
            )
            for shared in opened
        ]
        if len(tiers) == 1:
            return tiers[0]
        return StackedTier(*tiers, keeps_all=self._disk is not None and self._disk.keeps_all)

    def _open_arena(self, ranks: Ranks, agree: Agree, window: int) -> SharedArena:
        key = self._agreed_key(ranks, agree) if self.stage.is_private else self.stage.key
        key = self.name_of(key)
        base = self.dataset
        self.key = key
        regions = with_window(self.policy.regions(), self.capacity, window)
        # A job that began before the files were rebuilt has other samples.
        shared_as = f"{key}-{self._local_identity}" if self._local_identity else key
        capacity, limit = self._allowed(shared_as, self.capacity + window, regions)
        opened = open_arena(
            shared_as,
            len(base),
            capacity,
            self.mean_size,
            regions,
            description=self._name,
            limit_bytes=limit,
        )
        tell_opened()
        return opened

    @property
    def _job(self) -> str:
        """What the job calls itself."""
        return self.cache.sharing.name or f"{self.recipe.name} {os.getpid()}"

    def _allowed(self, key: str, wanted: int, regions: list[Region]) -> tuple[int, int | None]:
        """Return the bytes of ``wanted`` that the node's service lets a new cache have, and now."""
        allowed, self._fetch_share, limit = capacity_allowed(
            key,
            self.population.num_samples,
            wanted,
            self.mean_size,
            regions,
            wait=self.cache.sharing.wait,
            job=self._job,
            data=self._name,
        )
        if allowed < wanted and allowed < self._largest:
            raise CapacityError(
                f"the service of this node has room for {format_bytes(allowed)}, and the largest "
                f"sample has {format_bytes(self._largest)}: give `stoker serve` more with --memory "
                "or --quota"
            )
        if allowed < wanted:
            warn_caller(
                f"the cache has {format_bytes(allowed)}, not the {format_bytes(wanted)} asked for: "
                "the service of this node has no room for more"
            )
        return allowed, limit

    def name_of(self, key: str) -> str:
        """Return the key under which the visited part of the data set is shared."""
        label = self.population.label
        return f"{key}-subset-{label}" if label else key

    def _agreed_key(self, ranks: Ranks, agree: Agree) -> str:
        """Return the private key that all ranks use."""
        agreed = agree(self.stage.key, ranks)
        if agreed is None:
            warn_caller(
                f"{ranks.world_size} ranks each keep a cache of their own, as they cannot agree "
                "on one: initialize torch.distributed first, or give wrap() a name"
            )
        return agreed or self.stage.key

    def __str__(self) -> str:
        """Return what is cached, and how, in one line."""
        share = 1.0 if self.capacity >= self.data_bytes else self.capacity / self._whole_bytes
        visited, every = len(self.population), self.population.num_samples
        part = "" if visited == every else f" of {every:,}"
        kept = f"cache {format_bytes(self.capacity)} ({share:.0%})" if self.capacity else "no cache"
        return (
            f"{self._name}: {visited:,}{part} samples, {format_bytes(self._whole_bytes)}; "
            f"recipe {self.recipe.name}; {', '.join([kept, *self._below])}"
        )

    @property
    def _below(self) -> list[str]:
        """What else says how samples are cached, a few words each."""
        below = [] if self.stage.is_bytes_of_source else ["decoded"]
        if self.stage.originals is not None:
            below = [self.cache.stage]
        below += [] if self._disk is None else ["on disk below"]
        return below + ([] if self._pool is None else ["with a pool"])

    @property
    def _name(self) -> str:
        """Kind and place of the data set, without what is secret."""
        base = self.dataset
        return redacted(f"{type(base).__name__} {getattr(base, 'root', '')}".strip())

    def describe(self, cached: CachedSamples) -> str:
        """Return a line on the cache that was opened and what to expect of it."""
        stats = cached.store.tier.stats()
        if not stats["capacity_bytes"]:
            return "no cache: every access reads the source"
        window = stats.get("regions", {}).get(WINDOW, {"budget": 0})["budget"]
        held = int(stats["capacity_bytes"]) - window
        share = min(1.0, held / self.data_bytes) if self.data_bytes else 0.0
        predicted = self.recipe.predicted_hit_ratio(share)
        expected = "unknown" if predicted is None else f"{predicted:.1%} of bytes"
        overhead = format_bytes(stats.get("overhead_bytes", 0))
        return (
            f"cache {format_bytes(held)}{_on_disk(stats)} + {format_bytes(window)} ahead + "
            f"{overhead} overhead, "
            f"{share:.1%} of {format_bytes(self.data_bytes)}; recipe {self.recipe.name}; "
            f"predicted hit ratio from the second epoch on: {expected}"
        )


def setup_without_plan(
    dataset: Samples, population: Population, cache: Cache, recipe: str | Recipe | None
) -> CacheSetup:
    """Return the setup of a cache for samples that are asked for in an order that is not known.

    The default of ``recipe`` is ``minio``; how it samples is not used. Raises
    :class:`~stoker.errors.ConfigError` for what needs a plan: such a recipe, and a Cache with
    ``prefetch``, ``fetchers``, ``locality`` or ``sharing`` of its own.
    """
    chosen = as_recipe(recipe, is_planned=False)
    if chosen.needs_plan or chosen.policy.follows_scores:
        raise ConfigError(
            f"recipe {chosen.name!r} needs a plan, which only the Loader has: use "
            "the Loader, or a recipe like 'minio'"
        )
    for name in ("prefetch", "fetchers", "locality", "sharing"):
        if (value := getattr(cache, name)) != getattr(Cache(), name):
            raise ConfigError(f"{name}={value!r} needs the Loader: use it, or leave {name} out")
    return CacheSetup(dataset, population, cache, chosen)


def _on_disk(stats: dict[str, Any]) -> str:
    """Return how much of the cache is on disk, as text."""
    disk = stats.get("disk")
    return f" ({format_bytes(disk['capacity_bytes'])} of it on disk)" if disk else ""
