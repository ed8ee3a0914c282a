"""Reads what the plan needs next, with as much concurrency as makes the storage faster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stoker.prefetch.lanes import ConcurrencyLimit, Lanes
from stoker.prefetch.reading import WINDOW, OneByOne, Place, Together
from stoker.prefetch.walk import Group, Walk
from stoker.source.base import Source
from stoker.store.substitutes import ByNeighbour
from stoker.store.tier import Pool

_GROUP_BYTES = 512 << 10  # of a group that is read at once
_GROUP_SAMPLES = 32
_PIECES_BYTES = 2 << 20  # of a group that is read sample by sample
_PIECES = 64
_UNDER_WAY_BYTES = 1 << 20  # at first, of such
_FIRST = 16  # samples under way at first, and 4 groups at least
_BACK_OFF = 0.5  # seconds after a storage that gave up
_LOOK_AGAIN = 0.01  # seconds between two looks at whether stand-ins are still there


class Consumer(Place, Protocol):
    """One rank's share of the prefetch process."""

    walk: Walk
    ready: deque[Group]
    """What was handed out and is not all served."""
    spared: deque[Group]
    """What of it is not read, since another sample stands in."""
    stand_ins: ByNeighbour | None
    """Says for whom another sample stands in, where the rank's recipe has that."""


class Fetcher:
    """Follows walks, and claims, reads and publishes what the cache lacks.

    What is on disk comes up from there, and what is in ``pool`` is not read. What memory would
    not keep waits in its region :data:`WINDOW`. A sample that cannot be read is left to the worker
    that needs it, who says what is wrong.
    :meth:`step` belongs to one thread; reads run in threads of its own, and the fetcher becomes
    readable for ``poll`` when another can begin.
    """

    def __init__(
        self, source: Source, limit: ConcurrencyLimit | None = None, pool: Pool | None = None
    ) -> None:
        self._source = source
        self._pool = pool
        lanes = source.lanes if pool is None else 0
        self._is_one_by_one = lanes > 0
        mean = max(1, int(source.sizes.mean()) if len(source) else 1)
        if self._is_one_by_one:
            self._most = int(np.clip(_PIECES_BYTES // mean, 1, _PIECES))
            first = int(np.clip(_UNDER_WAY_BYTES // mean, 8, 64))
            default = ConcurrencyLimit(min(4, lanes), lanes, first=first)
        else:
            self._most = int(np.clip(_GROUP_BYTES // mean, 1, _GROUP_SAMPLES))
            default = ConcurrencyLimit(max(4, _FIRST // self._most))
        self._lanes = Lanes(limit or default, ahead=int(self._is_one_by_one))
        self._pause_until = self._look_again_at = 0.0

    def step(self, consumers: Sequence[Consumer]) -> bool:
        """Release what was served and start reads; True if any was started."""
        self._lanes.hear()
        for consumer in consumers:
            self._let_go(consumer, consumer.walk.advance())
            consumer.walk.confirm()
        now = time.monotonic()
        if self._lanes.has_failed:
            self._pause_until = now + _BACK_OFF
        started, progress = False, now >= self._pause_until
        if progress and now >= self._look_again_at:
            self._look_again_at = now + _LOOK_AGAIN
            for consumer in consumers:
                self._look_again(consumer)
        while progress:
            progress = False
            for consumer in consumers:
                if not self._lanes.has_room:
                    return started
                progress = self._start(consumer) or progress
                started = started or progress
        return started

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read."""
        return self._lanes.is_idle

    def fileno(self) -> int:
        """Return the descriptor that is readable once another read can begin."""
        return self._lanes.fileno()

    def close(self) -> None:
        """Start no more reads. Those under way are not waited for: a storage may hang."""
        self._lanes.close()

    @staticmethod
    def _let_go(consumer: Consumer, position: int) -> None:
        """Give up what was read ahead for accesses before ``position``."""
        consumer.tier.arena.release(position - 1)
        while consumer.ready and consumer.ready[0].position < position:
            # What waited in the window is not to stay: the policy did not want it.
            consumer.tier.drop_from(WINDOW, consumer.ready.popleft().ids)
        while consumer.spared and consumer.spared[0].position < position:
            consumer.spared.popleft()

    def _start(self, consumer: Consumer) -> bool:
        group = consumer.walk.take(self._most)
        if group is None:
            return False
        if group.ids.size:
            consumer.ready.append(group)
            arena = consumer.tier.arena
            # What is cached and far off is the policy's to keep.
            wanted = group if group.is_near else group.part(~arena.contains(group.ids))
            # In order of the plan, which the release by position relies on. What cannot be leased
            # could be gone before it is used, and is left to the worker.
            if arena.lease(wanted.ids, group.position):
                missing = wanted.part(~arena.contains(wanted.ids))
                if consumer.stand_ins is not None:
                    _, spared = consumer.stand_ins.key_samples(missing.ids)
                    if spared.any():
                        consumer.spared.append(missing.part(spared))
                        missing = missing.part(~spared)
                consumer.walk.keep_room_for(missing.ids)
                self._start_reading(consumer, missing)
        consumer.walk.confirm()
        return True

    def _look_again(self, consumer: Consumer) -> None:
        """Read samples that were skipped for a stand-in which has been evicted since."""
        groups = consumer.spared
        if consumer.stand_ins is None or not groups:
            return
        ids = np.concatenate([group.ids for group in groups])
        _, spared = consumer.stand_ins.key_samples(ids)
        if spared.all():
            return
        ends = np.cumsum([len(group.ids) for group in groups])
        for number, still in enumerate(np.split(spared, ends[:-1])):
            if not self._lanes.has_room:
                return
            group = groups[number]
            if not still.all():
                groups[number] = group.part(still)
                left = group.part(~still & ~consumer.tier.arena.contains(group.ids))
                consumer.walk.make_room_for(left.ids, left.position)
                self._start_reading(consumer, left)

    def _start_reading(self, consumer: Consumer, group: Group) -> None:
        """Claim what of the group is not cached, and have it brought."""
        if not group.ids.size:
            return
        group = group.part(np.unique(group.ids, return_index=True)[1])
        own = consumer.tier.claim(group.ids)
        # A worker that started meanwhile may have read it already, and kept no copy.
        late = own & ~group.are_wanted()
        if late.any():
            consumer.tier.abandon(group.ids[late])
        group, own = group.part(~late), own[~late]
        if not self._is_one_by_one:
            self._lanes.add(Together(self._source, self._pool, consumer, group, own))
            return
        if own.any():
            self._lanes.add(OneByOne(self._source, consumer, group.part(own)))
        if not own.all():
            below = group.part(~own)
            self._lanes.add(Together(self._source, None, consumer, below, own[~own]))
