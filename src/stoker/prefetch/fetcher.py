"""Reads what the plan needs next, with as much concurrency as makes the storage faster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceUnavailable, StokerError
from stoker.prefetch.walk import Group, Walk
from stoker.source.base import Source
from stoker.source.packed import Packed
from stoker.store.arena import Arena
from stoker.store.flight import Meter, Upstream
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.substitutes import ByNeighbour
from stoker.store.tier import Pool

_GROWTH = 1.5
_GAIN = 1.05  # throughput must grow at least so much for a higher limit to be kept
_CALM = 10  # intervals between two attempts to grow
_RECOVERY = 10  # intervals of quiet after the storage asked for less
log = logging.getLogger("stoker.prefetch")
WINDOW = "window"
"""Name of the arena's region for samples that wait for their access and are not to stay."""
_GROUP_BYTES = 512 << 10
_GROUP_SAMPLES = 32
_FIRST = 16  # samples under way at first, and 4 groups at least
_BACK_OFF = 0.5  # seconds after a storage that gave up
_LOOK_AGAIN = 0.01  # seconds between two looks at whether stand-ins are still there
_LOCKED = 2.0  # seconds that the arena's lock is waited for before what was read is inserted
_NONE = np.zeros(0, np.bool_)


class ConcurrencyLimit:
    """A limit on concurrency that climbs while throughput climbs, and halves when throttled.

    ``least`` and ``most`` bound it; it starts at ``least``. ``interval`` seconds of reading with
    the limit reached make one measurement. It never looks at a clock itself: the caller says how
    late it is. Not thread-safe.
    """

    def __init__(self, least: int = 4, most: int = 64, interval: float = 0.1) -> None:
        self.limit = least
        """Reads that may be under way now."""
        self._least, self._most, self._interval = least, most, interval
        self._before: tuple[int, float] | None = None  # limit and rate before the attempt under way
        self._quiet = 0  # intervals to wait before the next attempt
        self._bytes = 0
        self._began: float | None = None

    def done(self, num_bytes: int, now: float, saturated: bool) -> None:
        """Note a finished read; ``saturated``: the limit was what held others back."""
        if not saturated:
            self._began = None
            return
        if self._began is None:
            self._began, self._bytes = now, 0
            return
        self._bytes += num_bytes
        if now - self._began >= self._interval:
            self._measured(self._bytes / (now - self._began))
            self._began, self._bytes = now, 0

    def throttled(self) -> None:
        """Note that the storage throttled or failed: back off for a while."""
        self.limit = max(self._least, self.limit // 2)
        self._before, self._quiet, self._began = None, _RECOVERY, None

    def _measured(self, rate: float) -> None:
        if self._quiet > 0:
            self._quiet -= 1
        elif self._before is None or rate > self._before[1] * _GAIN:
            self._before = self.limit, rate
            self.limit = min(self._most, int(self.limit * _GROWTH) + 1)
        else:
            self.limit = self._before[0]
            self._before, self._quiet = None, _CALM


class Consumer(Protocol):
    """One rank's share of the prefetch process."""

    walk: Walk
    tier: MemoryTier | StackedTier
    """A membership of its own, so that its leases end with it."""
    fresh: NDArray[np.uint8]
    """``u8[N]``: 1 at samples that were read for an access that has not happened yet."""
    meter: Meter
    """What is being read for the rank."""
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
    :meth:`step` belongs to one thread; reads run in threads of its own, and each that ends makes
    the fetcher readable for ``poll``, as another can begin.
    """

    def __init__(
        self, source: Source, limit: ConcurrencyLimit | None = None, pool: Pool | None = None
    ) -> None:
        self._source = source
        self._upstream = Upstream(source, pool)
        self._mutex = threading.Lock()
        self._under_way = 0
        self._is_held_back = False
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pause_until = self._look_again_at = 0.0
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="stoker-fetch")
        mean = max(1, int(source.sizes.mean()) if len(source) else 1)
        self._most = int(np.clip(_GROUP_BYTES // mean, 1, _GROUP_SAMPLES))
        self._limit = limit or ConcurrencyLimit(max(4, _FIRST // self._most))

    def step(self, consumers: Sequence[Consumer]) -> bool:
        """Release what was served and start reads; True if any was started."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ended)
        self._is_held_back = False
        for consumer in consumers:
            self._let_go(consumer, consumer.walk.advance())
            consumer.walk.confirm()
        now = time.monotonic()
        started, progress = False, now >= self._pause_until
        if progress and now >= self._look_again_at:
            self._look_again_at = now + _LOOK_AGAIN
            for consumer in consumers:
                self._look_again(consumer)
        while progress:
            progress = False
            for consumer in consumers:
                if self._under_way >= self._limit.limit:
                    self._is_held_back = True
                    return started
                progress = self._start(consumer) or progress
                started = started or progress
        return started

    def fileno(self) -> int:
        """Return the descriptor that is readable once a read has ended."""
        return self._ended

    def close(self) -> None:
        """Start no more reads. Those under way are not waited for: a storage may hang."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
            if self._under_way >= self._limit.limit:
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
        with self._mutex:
            self._under_way += 1
        self._pool.submit(self._fetch, consumer, group, own)

    def _fetch(self, consumer: Consumer, group: Group, own: NDArray[np.bool_]) -> None:
        num_bytes = 0
        try:
            num_bytes = self._bring(consumer, group, own)
        except SourceUnavailable as error:
            log.info("the storage does not keep up: %s", error)
            with self._mutex:
                self._limit.throttled()
                self._pause_until = time.monotonic() + _BACK_OFF
        except (StokerError, OSError) as error:
            log.info("not prefetched: %s", error)
        finally:
            with self._mutex:
                self._under_way -= 1
                self._limit.done(num_bytes, time.monotonic(), self._is_held_back)
            os.eventfd_write(self._ended, 1)

    def _bring(self, consumer: Consumer, group: Group, own: NDArray[np.bool_]) -> int:
        """Read those of the group that are claimed, and bring others up; return the bytes."""
        below = group.part(~own)
        risen = consumer.tier.rise(below.ids, below.keys, WINDOW) if below.ids.size else _NONE
        from_disk = int(self._source.sizes[below.ids[risen]].sum())
        return from_disk + (self._read(consumer, group.part(own)) if own.any() else 0)

    def _read(self, consumer: Consumer, group: Group) -> int:
        """Read and publish a group that is claimed; return the bytes."""
        left = group.ids
        try:
            brought = self._upstream.read(group.ids, group.keys, consumer.meter)
            (data, offsets), errors, pooled, _ = brought
            good = np.ones(len(group.ids), bool)
            good[list(errors)] = False
            if good.any():
                lengths = np.diff(offsets)[good]  # one that failed has no bytes in ``data``
                packed = Packed(data, np.concatenate([[0], np.cumsum(lengths)]))
                kept = self._publish(consumer, group.part(good), packed, ~pooled[good])
                left = np.setdiff1d(group.ids, kept, assume_unique=True)
            throttled = [e for e in errors.values() if isinstance(e, SourceUnavailable)]
            if throttled:
                raise throttled[0]
            return len(data)
        finally:
            if left.size:
                consumer.tier.abandon(left)

    @staticmethod
    def _publish(
        consumer: Consumer, group: Group, samples: Packed, is_read: NDArray[np.bool_]
    ) -> NDArray[np.uint32]:
        """Put samples into the cache, which were read where ``is_read``; return those there."""
        _await_lock(consumer.tier.arena, group.position)
        consumer.fresh[group.ids[is_read]] = 1
        admitted = consumer.tier.put_many(group.ids, samples, group.keys, WINDOW)
        consumer.fresh[group.ids[~admitted]] = 0
        return group.ids[admitted]


def _await_lock(arena: Arena, position: int) -> None:
    """Wait for the arena's lock, for a while.

    A put that does not get it loses what was read, and must not wait for long itself.
    """
    nothing = np.empty(0, np.uint32)
    deadline = time.monotonic() + _LOCKED
    while not arena.lease(nothing, position) and time.monotonic() < deadline:
        time.sleep(0.01)
