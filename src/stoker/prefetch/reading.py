"""Groups on their way from the source into the cache."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker._core import Rooms
from stoker.errors import SegmentError, SourceUnavailable, StokerError
from stoker.prefetch.lanes import ConcurrencyLimit, Lanes, Work
from stoker.prefetch.walk import Group
from stoker.source.base import Room, Source
from stoker.source.packed import Buffer, Packed, pick
from stoker.store.arena import Arena
from stoker.store.flight import Meter, Upstream
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.tier import Pool

log = logging.getLogger("stoker.prefetch")
WINDOW = "window"
"""Name of the arena's region for samples that wait for their access and are not to stay."""
_GROUP_BYTES = 512 << 10  # of a group that is read at once
_GROUP_SAMPLES = 32
_PIECES_BYTES = 4 << 20  # of a group that is read sample by sample
_PIECES = 64
_UNDER_WAY_BYTES = 4 << 20  # at first, of such
_FIRST = 16  # samples under way at first, and 4 groups at least
_LOCKED = 2.0  # seconds that the arena's lock is waited for before what was read is inserted
_NOTHING = np.empty(0, np.uint32)


class Destination(Protocol):
    """Where samples are brought for a rank."""

    tier: MemoryTier | StackedTier
    """A membership of its own, so that its leases and claims end with it."""
    fresh: NDArray[np.uint8]
    """``u8[N]``: 1 at samples that were read for an access that has not happened yet."""
    meter: Meter
    """What is being read for the rank."""


def entering(tier: MemoryTier | StackedTier, entrance: str) -> MemoryTier | StackedTier:
    """Return a rank's tier, whose samples go to the region ``entrance``; "": as for all."""
    return tier.entering(entrance) if entrance and isinstance(tier, MemoryTier) else tier


class Reader:
    """Claims groups and reads them, in threads of this process."""

    def __init__(
        self, source: Source, pool: Pool | None = None, limit: ConcurrencyLimit | None = None
    ) -> None:
        self._source, self._pool = source, pool
        threads = source.lanes if pool is None else 0
        self._is_one_by_one = threads > 0
        mean = max(1, int(source.sizes.mean()) if len(source) else 1)
        if self._is_one_by_one:
            self.most = int(np.clip(_PIECES_BYTES // mean, 1, _PIECES))
            first = int(np.clip(_UNDER_WAY_BYTES // mean, 8, 32))
            default = ConcurrencyLimit(min(4, threads), threads, first=first)
        else:
            self.most = int(np.clip(_GROUP_BYTES // mean, 1, _GROUP_SAMPLES))
            default = ConcurrencyLimit(max(4, _FIRST // self.most))
        multiplexer = source.multiplexer() if self._is_one_by_one else None
        self._is_multiplexed = multiplexer is not None
        self.lanes = Lanes(limit or default, int(self._is_one_by_one), multiplexer)

    def start(self, destination: Destination, group: Group) -> None:
        """Claim what of the group is not cached, and have the group brought."""
        for work in self.claim(destination, group)[0]:
            self.lanes.add(work)

    def claim(self, destination: Destination, group: Group) -> tuple[list[Work], int]:
        """Claim what of the group is not cached; return the work to do, and how many are claimed.

        Ids are unique in it.
        """
        own = destination.tier.claim(group.ids)
        # A worker that started meanwhile may have read it already, and kept no copy.
        late = own & ~group.are_wanted()
        if late.any():
            destination.tier.abandon(group.ids[late])
        group, own = group.part(~late), own[~late]
        if not len(own):
            return [], 0
        if not self._is_one_by_one:
            return [Together(self._source, self._pool, destination, group, own)], int(own.sum())
        works: list[Work] = []
        if own.any():
            brought = group.part(own)
            rooms = self._reserve(destination, brought) if self._is_multiplexed else None
            works.append(OneByOne(self._source, destination, brought, rooms))
        if not own.all():
            works.append(Together(self._source, None, destination, group.part(~own), own[~own]))
        return works, int(own.sum())

    def _reserve(self, destination: Destination, group: Group) -> Rooms | None:
        """Return where samples that are claimed may be written to, if that is known yet."""
        tier = destination.tier
        if group.is_early is not None or not isinstance(tier, MemoryTier):
            return None
        return tier.reserve(group.ids, self._source.sizes[group.ids], group.keys, WINDOW)


class Together:
    """A group that is brought at once, from the disk or with one read; see :class:`Work`.

    Those of it that are ``own`` are claimed: they are read.
    """

    num_pieces = 1

    def __init__(
        self,
        source: Source,
        pool: Pool | None,
        destination: Destination,
        group: Group,
        own: NDArray[np.bool_],
    ) -> None:
        self._source, self._pool, self._destination = source, pool, destination
        self._group, self._own = group, own
        self._is_fine = True

    def begin(self, piece: int) -> None:
        """Return None: it is more than a sample."""

    def room(self, piece: int) -> None:
        """Return None."""

    def read(self, piece: int) -> int:
        """Bring the group; return the bytes."""
        try:
            return self._rise() + self._read()
        except SourceUnavailable as error:
            log.info("the storage does not keep up: %s", error)
            self._is_fine = False
        except Exception as error:  # the worker that needs a sample says what a source raises
            log.info("not prefetched: %s", error)
        return 0

    def keep(self, piece: int, buffer: Buffer) -> int:
        """Never called: no piece is a sample."""
        raise NotImplementedError

    def finish(self) -> bool:
        """Return whether the storage keeps up."""
        return self._is_fine

    def _rise(self) -> int:
        below = self._group.part(~self._own)
        if not below.ids.size:
            return 0
        risen = self._destination.tier.rise(below.ids, below.keys, WINDOW)
        return int(self._source.sizes[below.ids[risen]].sum())

    def _read(self) -> int:
        group = self._group.part(self._own)
        left = group.ids
        if not left.size:
            return 0
        try:
            upstream = Upstream(self._source, self._pool)
            brought = upstream.read(group.ids, group.keys, self._destination.meter)
            (data, offsets), errors, pooled, _ = brought
            good = np.ones(len(group.ids), bool)
            good[list(errors)] = False
            if good.any():
                lengths = np.diff(offsets)[good]  # one that failed has no bytes in ``data``
                packed = Packed(data, np.concatenate([[0], np.cumsum(lengths)]))
                kept = _publish(self._destination, group.part(good), packed, ~pooled[good])
                left = np.setdiff1d(group.ids, kept, assume_unique=True)
            throttled = [e for e in errors.values() if isinstance(e, SourceUnavailable)]
            if throttled:
                raise throttled[0]
            return len(data)
        finally:
            _give_back(self._destination, left)


class OneByOne:
    """A group that is claimed, and read sample by sample; see :class:`Work`.

    What was read is in its room in the cache, or stays in the memory it came in until it is copied
    there.
    """

    def __init__(
        self, source: Source, destination: Destination, group: Group, rooms: Rooms | None = None
    ) -> None:
        self._source, self._destination, self._group = source, destination, group
        self._rooms = rooms
        self._has_room = np.zeros(len(group.ids), bool) if rooms is None else rooms.reserved()
        self._is_there = np.zeros(len(group.ids), bool)  # in its room
        self._ids: list[int] = group.ids.tolist()
        # By piece: its bytes where it has a room, else 0.
        self._sizes: list[int] = (source.sizes[group.ids] * self._has_room).tolist()
        self._buffers: list[Buffer | None] = [None] * len(self._ids)
        self._error: Exception | None = None
        self.num_pieces = len(self._ids)

    def begin(self, piece: int) -> int:
        """Return which sample it is; reading begins with the first."""
        if piece == 0:
            self._destination.meter.begin()
        return self._ids[piece]

    def room(self, piece: int) -> Room | None:
        """Return where a sample is written to."""
        return (self._rooms, piece) if self._rooms is not None else None

    def read(self, piece: int) -> int:
        """Read one sample; return its bytes."""
        try:
            buffer = self._source.read_one(self._ids[piece])
        except Exception as error:  # the claims are given back, whatever a source raises
            if not isinstance(self._error, SourceUnavailable):
                self._error = error
            return 0
        return self.keep(piece, buffer)

    def keep(self, piece: int, buffer: Buffer) -> int:
        """Keep one sample until all are there; return its bytes."""
        size, rooms = self._sizes[piece], self._rooms
        is_there = size and not len(buffer)
        if size and not is_there and rooms is not None:
            is_there = rooms.fill(piece, np.frombuffer(buffer, np.uint8))
        if is_there:
            self._is_there[piece] = True
            return size
        self._buffers[piece] = buffer
        return len(buffer)

    def finish(self) -> bool:
        """Publish what was read; return whether the storage keeps up."""
        self._destination.meter.end(len(self._ids))
        left = self._group.ids[~self._has_room]
        try:
            kept = self._publish()
            left = left[~np.isin(left, kept)]
        except (StokerError, OSError) as error:
            log.info("not prefetched: %s", error)
        finally:
            _give_back(self._destination, left)
        if self._error is not None:
            log.info("not prefetched: %s", self._error)
        return not isinstance(self._error, SourceUnavailable)

    def _publish(self) -> NDArray[np.uint32]:
        """Publish what came; return what of it was copied, and is there."""
        if self._rooms is not None:
            ids, fresh = self._group.ids, self._destination.fresh
            fresh[ids[self._is_there]] = 1
            is_cached = self._rooms.settle(self._is_there)
            if not is_cached.all():
                fresh[ids[self._is_there & ~is_cached]] = 0
        samples = [buffer for buffer in self._buffers if buffer is not None]
        group = self._group
        if 0 < len(samples) < len(self._ids):
            group = group.part(np.array([buffer is not None for buffer in self._buffers]))
        return _publish(self._destination, group, samples, np.True_) if samples else _NOTHING


def _give_back(destination: Destination, ids: NDArray[np.uint32]) -> None:
    """Give back the claims of ``u32[n]``, unless the rank has left, and its claims with it."""
    if not ids.size:
        return
    try:
        destination.tier.abandon(ids)
    except SegmentError as error:
        log.info("not given back: %s", error)


def _publish(
    destination: Destination,
    group: Group,
    samples: Packed | list[Buffer],
    is_read: NDArray[np.bool_] | np.bool_,
) -> NDArray[np.uint32]:
    """Put samples into the cache, which were read where ``is_read``; return those there."""
    _await_lock(destination.tier.arena, group.position)
    destination.fresh[group.ids] |= is_read
    admitted = put_read(destination.tier, group, samples)
    if admitted.all():
        return group.ids
    destination.fresh[group.ids[~admitted]] = 0
    return group.ids[admitted]


def put_read(
    tier: MemoryTier | StackedTier, group: Group, samples: Packed | list[Buffer]
) -> NDArray[np.bool_]:
    """Put what was read of a group into the cache; return bool[n], which are there.

    The window has room for what is accessed next. What comes early has to suit the policy.
    """
    early = group.is_early
    if early is None or not early.any():
        return tier.put_many(group.ids, samples, group.keys, WINDOW)
    admitted = np.zeros(len(group.ids), np.bool_)
    for chosen, overflow in ((np.flatnonzero(~early), WINDOW), (np.flatnonzero(early), "")):
        some = (
            pick(samples, chosen)
            if isinstance(samples, Packed)
            else [samples[row] for row in chosen.tolist()]
        )
        keys = None if group.keys is None else group.keys[chosen]
        admitted[chosen] = tier.put_many(group.ids[chosen], some, keys, overflow)
    return admitted


def _await_lock(arena: Arena, position: int) -> None:
    """Wait for the arena's lock, for a while.

    A put that does not get it loses what was read, and must not wait for long itself.
    """
    deadline = time.monotonic() + _LOCKED
    while not arena.lease(_NOTHING, position) and time.monotonic() < deadline:
        time.sleep(0.01)
