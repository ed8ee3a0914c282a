"""Reads what the plan needs next, with as much concurrency as makes the storage faster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from stoker.node.bandwidth import FetchShare
from stoker.prefetch.crew import Crew, CrewDestination
from stoker.prefetch.lanes import ConcurrencyLimit
from stoker.prefetch.reading import WINDOW, Reader
from stoker.prefetch.walk import Group, Walk
from stoker.source.base import Source
from stoker.store.substitutes import ByNeighbour
from stoker.store.tier import Pool

_BACK_OFF = 0.5  # seconds after a storage that gave up
_LOOK_AGAIN = 0.01  # seconds between two looks at whether stand-ins are still there


class Consumer(CrewDestination, Protocol):
    """One rank's share of the prefetch process."""

    walk: Walk
    ready: deque[Group]
    """What was handed out and is not all served."""
    spared: deque[Group]
    """What of it is not read, since another sample stands in."""
    stand_ins: ByNeighbour | None
    """Says for whom another sample stands in, where the rank's recipe has that."""
    fetch_share: FetchShare
    """Says when it may read, where the jobs on this node share a limited bandwidth."""


C = TypeVar("C", bound=Consumer)


class Fetcher(Generic[C]):
    """Follows walks, and claims, reads and publishes what the cache lacks.

    What is on disk comes up from there, and what is in ``pool`` is not read. What memory would
    not keep waits in its region :data:`WINDOW`. A sample that cannot be read is left to the worker
    that needs it, who says what is wrong.
    :meth:`step` belongs to one thread; reads run in threads of its own, and the fetcher becomes
    readable for ``poll`` when another can begin.
    """

    def __init__(
        self,
        source: Source,
        limit: ConcurrencyLimit | None = None,
        pool: Pool | None = None,
        crew: Crew[C] | None = None,
    ) -> None:
        """Read from ``source`` in this process, and in those of ``crew`` if given."""
        self._reader = Reader(source, pool, limit)
        self._sizes = source.sizes
        self._lanes = self._reader.lanes
        self._crew = crew
        if crew is not None:
            crew.watch(self._lanes.fileno())
        self.is_held_back = False
        """Whether more would have been started in the latest step if there had been room."""
        self._left: deque[tuple[C, Group]] = deque()  # what others had in hand that are gone
        self._pause_until = self._look_again_at = 0.0

    def step(self, consumers: Sequence[C]) -> bool:
        """Release what was served and start reads; True if any was started."""
        self._hear(consumers)
        for consumer in consumers:
            self._let_go(consumer, consumer.walk.advance())
            self._confirm(consumer)
        now = time.monotonic()
        if self._has_failed:
            self._pause_until = now + _BACK_OFF
        self.is_held_back = started = False
        progress = now >= self._pause_until
        if progress and now >= self._look_again_at:
            self._look_again_at = now + _LOOK_AGAIN
            for consumer in consumers:
                self._look_again(consumer)
        while progress:
            progress = False
            for consumer in consumers:
                if not self._has_room:
                    self.is_held_back = True
                    return started
                progress = self._start(consumer) or progress
                started = started or progress
        return started

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read."""
        return self._lanes.is_idle and not self._left and (self._crew is None or self._crew.is_idle)

    @property
    def read_bytes(self) -> int:
        """Bytes that were read so far, here and by others."""
        return self._lanes.read_bytes + (0 if self._crew is None else self._crew.read_bytes)

    def fileno(self) -> int:
        """Return the descriptor that is readable once another read can begin."""
        return self._lanes.fileno() if self._crew is None else self._crew.fileno()

    def close(self) -> None:
        """Start no more reads. Those under way are not waited for: a storage may hang."""
        self._lanes.close()
        if self._crew is not None:
            self._crew.close()

    @property
    def _has_room(self) -> bool:
        return (self._crew is not None and self._crew.has_room) or self._lanes.has_room

    @property
    def _has_failed(self) -> bool:
        failed = self._lanes.has_failed
        if self._crew is not None and self._crew.has_failed:
            self._crew.has_failed, failed = False, True
        return failed

    def _hear(self, consumers: Sequence[C]) -> None:
        """Learn what was read, and take over from processes that are gone."""
        self._lanes.hear()
        if self._crew is None:
            return
        self._crew.hear()
        self._left += self._crew.take_lost()
        while self._left and self._has_room:
            consumer, group = self._left.popleft()
            if consumer in consumers:
                self._start_reading(consumer, group)

    def _confirm(self, consumer: C) -> None:
        """Tell the rank's workers what is claimed."""
        unclaimed = [] if self._crew is None else self._crew.unclaimed(consumer.number)
        unclaimed += [group.first for other, group in self._left if other is consumer]
        consumer.walk.confirm(min(unclaimed, default=None))

    @staticmethod
    def _let_go(consumer: C, position: int) -> None:
        """Give up what was read ahead for accesses before ``position``."""
        consumer.tier.arena.release(position - 1)
        while consumer.ready and consumer.ready[0].position < position:
            # What waited in the window is not to stay: the policy did not want it.
            consumer.tier.drop_from(WINDOW, consumer.ready.popleft().ids)
        while consumer.spared and consumer.spared[0].position < position:
            consumer.spared.popleft()

    def _start(self, consumer: C) -> bool:
        if consumer.fetch_share.seconds_to_wait():
            return False
        group = consumer.walk.take(self._reader.most)
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
                is_cached = arena.contains(wanted.ids)
                missing, cached = wanted.part(~is_cached), wanted.ids[is_cached]
                # What lies in the window for another access stays there for this one after it.
                shared = cached[arena.copies(cached, WINDOW) > 0]
                if consumer.stand_ins is not None:
                    _, spared = consumer.stand_ins.key_samples(missing.ids)
                    if spared.any():
                        consumer.spared.append(missing.part(spared))
                        missing = missing.part(~spared)
                consumer.walk.keep_room_for(np.concatenate([missing.ids, shared]))
                self._start_reading(consumer, missing.with_neighbours(arena.contains))
        self._confirm(consumer)
        return True

    def _look_again(self, consumer: C) -> None:
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
            if not self._has_room:
                return
            group = groups[number]
            if not still.all():
                groups[number] = group.part(still)
                left = group.part(~still & ~consumer.tier.arena.contains(group.ids))
                consumer.walk.make_room_for(left.ids, left.position)
                self._start_reading(consumer, left)

    def _start_reading(self, consumer: C, group: Group) -> None:
        """Have brought what of the group is not cached, here or by another process."""
        if not group.ids.size:
            return
        group = group.part(np.sort(np.unique(group.ids, return_index=True)[1]))
        fetched = group.ids
        for below in consumer.tier.arenas[1:]:
            fetched = fetched[~below.contains(fetched)]
        consumer.fetch_share.spend(int(self._sizes[fetched].sum()))
        if self._crew is not None and self._crew.has_room:
            self._crew.add(consumer, group)
        else:
            self._reader.start(consumer, group)
