"""Reading ahead in a replay: what the prefetch process does, without storage and without delay."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import BatchSpec
from stoker.epoch.planner import Cursor
from stoker.epoch.rank_share import RankShare
from stoker.plan import Plan
from stoker.prefetch.progress import Marks, Progress
from stoker.prefetch.reading import WINDOW, put_read
from stoker.prefetch.walk import Blocks, Group, Segment, Walk
from stoker.sim.replayed_cache import ReplayedCache, no_bytes
from stoker.store.substitutes import ByNeighbour

_GROUP = 32  # samples that are read at once


class ReplayedAhead:
    """Reads what a plan needs next into the cache's window, as far as there is room.

    It takes the steps of :class:`~stoker.prefetch.fetcher.Fetcher` over the same
    :class:`~stoker.prefetch.walk.Walk`, for one rank: what is read is there at once, but no more is
    than the storage had time for, and the batch that is due, each with the rest of its block.
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

    def read(self, ids: NDArray[np.uint32], samples: float) -> None:
        """Read what there is room for, the batch ``ids`` (``u32[n]``) that is served next first.

        ``samples`` is how many more storage can have given by now; it may be infinite.
        """
        self._let_go(self._walk.advance())
        self._given += samples
        self._due += len(ids)
        while self._given > 0 or self._handed_out < self._due:
            group = self._walk.take(_GROUP)
            if group is None:  # the window is full, and storage idles
                self._given = min(self._given, 0.0)
                break
            self._handed_out = group.position + 1
            if group.ids.size:
                self._bring(group)
        self._waiting = int(self._fresh[np.unique(ids)].sum())

    def served(self, spec: BatchSpec, epoch: int, fetched: int) -> None:
        """Note that a batch was served, and how many samples of it had to be fetched."""
        self._progress.finish(epoch, spec.first, len(spec.ids))
        self._given -= fetched - self._waiting  # what workers read themselves

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

    def _bring(self, group: Group) -> None:
        """Keep what is cached of the group, and read the rest."""
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
        group = group.part(own)
        kept = put_read(self._tier, group, no_bytes(len(group.ids)))
        self._fresh[group.ids[kept]] = 1
        self._given -= len(group.ids)
        self.num_read += len(group.ids)
