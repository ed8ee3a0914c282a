"""What one rank is going to read, how much of it may be read ahead, and how far all have come."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.shared import SharedArray
from stoker.source.base import Source

Ids = NDArray[np.uint32]


_GROUPS = 4  # fill a window at least
_REACH_IN_BLOCKS = 1 / 8  # of the reach: what is read beside them takes up the cache meanwhile

STARTED, SERVED = 1, 2
"""What a worker says of an access: it sees to it itself now; it needs the cached copy no more."""

_AT_ONCE = 1024  # marks that are looked at
_HEAD = 5  # i64
_LIFE = 1.0  # seconds for which a sign of life counts
_STARTING = 5.0  # seconds that the prefetch process may take to start
_PATIENCE = 3.0  # seconds without any progress of it
_GLANCE = 0.002  # seconds between two looks
_NOTICED = 0.1  # seconds in which the prefetch process sees that its window can move


class Blocks:
    """Which accesses of a segment are of one block of adjacent samples, which is read at once."""

    def __init__(self, numbers: Ids, keys: NDArray[np.float64] | None) -> None:
        """``numbers`` (``u32[A]``): the block of each access; ``keys`` (``f64[A]``): until then."""
        self._numbers, self.keys = numbers, keys

    def of(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return i64[m], all accesses of the blocks that those at ``offsets`` i64[n] are of."""
        order, begins = self._by_block
        found = np.unique(self._numbers[offsets])
        counts = begins[found + 1] - begins[found]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        accesses: NDArray[np.int64] = order[np.repeat(begins[found], counts) + within]
        return accesses

    @cached_property
    def _by_block(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The accesses block by block, and where each block begins among them."""
        counts = np.bincount(self._numbers)
        return np.argsort(self._numbers, kind="stable"), np.append(0, np.cumsum(counts))


class Segment(NamedTuple):
    """One epoch of a rank's coming accesses."""

    epoch: int
    ids: Ids
    """``u32[A]``, in the order of access."""
    keys: NDArray[np.float64] | None
    """``f64[A]``, under which each sample is kept after its access; None: the policy needs none."""
    marks: Marks
    """Of ``A`` accesses or more, shared with the rank's workers."""
    generation: int
    """Of the marks; in a later one they are those of another epoch, and this one is over."""
    blocks: Blocks | None = None
    """Which of them are read at once; None: each sample for itself."""

    @property
    def is_over(self) -> bool:
        """Whether the marks are used for a later epoch by now."""
        return self.marks.generation != self.generation


class Group(NamedTuple):
    """Accesses that are fetched together."""

    ids: Ids
    keys: NDArray[np.float64] | None
    position: int
    """Of the last one, counted since the walk began."""
    segment: Segment
    offsets: NDArray[np.int64]
    """``i64[n]``: where each of ``ids`` stands in the segment."""
    is_near: bool
    """Whether the window would reach it if nothing was cached."""
    first: int
    """Position of the first access that was handed out with it."""
    is_early: NDArray[np.bool_] | None = None
    """``bool[n]``: which are accessed later than ``position``, and are read because they lie beside
    others; None: none of them."""

    def are_wanted(self) -> NDArray[np.bool_]:
        """Return ``bool[n]``: which no worker has started on yet."""
        wanted = self.segment.marks.served[self.offsets] == 0
        return np.zeros_like(wanted) if self.segment.is_over else wanted

    def part(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Group:
        """Return the chosen ones of the group."""
        keys = None if self.keys is None else self.keys[chosen]
        early = None if self.is_early is None else self.is_early[chosen]
        ids, offsets = self.ids[chosen], self.offsets[chosen]
        return self._replace(ids=ids, keys=keys, offsets=offsets, is_early=early)

    def with_neighbours(self, are_cached: Callable[[Ids], NDArray[np.bool_]]) -> Group:
        """Return the group with what else of its blocks is not cached, nor started on."""
        blocks = self.segment.blocks
        if blocks is None or not self.ids.size:
            return self
        offsets = np.setdiff1d(blocks.of(self.offsets), self.offsets, assume_unique=True)
        offsets = offsets[self.segment.marks.served[offsets] == 0]
        offsets = offsets[~are_cached(self.segment.ids[offsets])]
        keys = self.keys
        if keys is not None and blocks.keys is not None:
            keys = np.concatenate([keys, blocks.keys[offsets]])
        both = np.concatenate([self.offsets, offsets])
        ids = self.segment.ids[both]
        is_early = np.arange(len(both)) >= len(self.offsets)
        return self._replace(ids=ids, keys=keys, offsets=both, is_early=is_early)


class _HandedOut(NamedTuple):
    """An unfinished group."""

    first: int
    end: int
    num_bytes: int
    room: int
    """Bytes of the window that it takes up."""


class Walk:
    """The accesses of one rank still to come, and a window over them.

    The window begins with the first group that is not all served and holds ``window_bytes`` at
    most: a larger sample is left to the workers. They serve in any order within it. What turns
    out to be cached takes up no room, so that the window reaches beyond a run of hits, as an
    epoch begins with where next use is the key; but to ``reach_bytes`` at most, with them, an
    eighth of it where blocks are read. Not thread-safe.
    """

    def __init__(self, sizes: NDArray[np.int64], window_bytes: int, reach_bytes: int = 0) -> None:
        self._sizes = sizes
        self._window_bytes = window_bytes
        self._reach_bytes = max(window_bytes, reach_bytes)
        self._segments: deque[Segment] = deque()
        self._ends: deque[NDArray[np.int64]] = deque()
        self._base = 0  # accesses in segments that are over
        self._low = 0  # in the first segment: nothing before it is unserved
        self._head = 0  # in all segments: nothing from it on was handed out
        self._groups: deque[_HandedOut] = deque()
        self._ready = self._passed = 0  # room and bytes of those groups
        self._is_full = False  # the window was what kept the last group back

    def add(self, segment: Segment) -> None:
        """Append an epoch."""
        self._segments.append(segment)
        # What is not to be read takes up no room.
        left = segment.marks.served[: len(segment.ids)] == 0
        self._ends.append(np.cumsum(self._sizes[segment.ids] * left, dtype=np.int64))

    def reset(self) -> None:
        """Forget all accesses, because the rank goes to another position."""
        self._base += sum(len(segment.ids) for segment in self._segments)
        self._segments.clear()
        self._ends.clear()
        self._groups.clear()
        self._low = self._head = self._ready = self._passed = 0

    @property
    def held(self) -> int:
        """Bytes that lie ready, or are on their way."""
        return self._ready

    def resize(self, window_bytes: int) -> None:
        """Limit what is handed out from now on; what was read ahead stays."""
        self._window_bytes = window_bytes

    def advance(self) -> int:
        """Check what was served, and return the position up to which all groups are done."""
        while self._segments:
            segment, length = self._segments[0], len(self._segments[0].ids)
            low = _first_unserved(segment.marks.served[:length], self._low)
            # Looked at last: the marks count only if they were this epoch's till then.
            self._low = length if segment.is_over else low
            if self._low < length:
                break
            self._base += length
            self._head = max(0, self._head - length)
            self._low = 0
            self._segments.popleft()
            self._ends.popleft()
        self._head = max(self._head, self._low)
        position = self._base + self._low
        while self._groups and self._groups[0].end <= position:
            over = self._groups.popleft()
            self._ready -= over.room
            self._passed -= over.num_bytes
        return min(position, self._groups[0].first) if self._groups else position

    def confirm(self, end: int | None = None) -> None:
        """Tell the workers that this process is alive, and has claimed what was handed out.

        Or what of it is before ``end``, a position counted since the walk began.
        """
        offset = self._head if end is None else min(self._head, max(0, end - self._base))
        for segment in self._segments:
            if not segment.is_over:
                segment.marks.hand_out(min(offset, len(segment.ids)), self._is_full)
                segment.marks.attend()
            offset = max(0, offset - len(segment.ids))

    def take(self, most: int) -> Group | None:
        """Return the next accesses, at most ``most``, that the window has room for."""
        offset = self._head
        for segment, ends in zip(self._segments, self._ends, strict=True):
            if offset < len(segment.ids):
                group = self._take_from(segment, ends, offset, most)
                self._is_full = group is None
                return group
            offset -= len(segment.ids)
        return None

    def keep_room_for(self, ids: Ids) -> None:
        """Reduce the space of the latest group to these samples."""
        self._give_room(len(self._groups) - 1, int(self._sizes[ids].sum()))

    def make_room_for(self, more: Ids, position: int) -> None:
        """Add these samples to the space of the group at this position."""
        for number, group in enumerate(self._groups):
            if group.end == position + 1:
                self._give_room(number, group.room + int(self._sizes[more].sum()))

    def _give_room(self, number: int, room: int) -> None:
        group = self._groups[number]
        self._groups[number] = group._replace(room=room)
        self._ready += room - group.room

    def _take_from(
        self, segment: Segment, ends: NDArray[np.int64], begin: int, most: int
    ) -> Group | None:
        # A group takes up its room until all of it is served, so small windows get small groups.
        room = min(self._window_bytes - self._ready, self._window_bytes // _GROUPS)
        reach = self._reach_bytes
        if segment.blocks is not None:
            reach = max(self._window_bytes, int(reach * _REACH_IN_BLOCKS))
        if self._passed > reach:
            return None
        before = int(ends[begin - 1]) if begin else 0
        end = begin + int(np.searchsorted(ends[begin : begin + most], before + room, "right"))
        if end == begin:
            size = int(ends[begin]) - before
            alone = size > self._window_bytes // _GROUPS
            if not alone or self._ready + size > self._window_bytes:
                return None
            end = begin + 1
        wanted = begin + np.flatnonzero(segment.marks.served[begin:end] == 0)
        if segment.is_over:
            return None
        ids = segment.ids[wanted]
        num_bytes = int(self._sizes[ids].sum())
        first = self._base + self._head
        # What workers see to takes up no room.
        self._groups.append(_HandedOut(first, first + end - begin, num_bytes, num_bytes))
        self._ready += num_bytes
        self._passed += num_bytes
        self._head += end - begin
        return Group(
            ids,
            None if segment.keys is None else segment.keys[wanted],
            self._base + self._head - 1,
            segment,
            wanted,
            self._passed <= self._window_bytes,
            first,
        )


def _first_unserved(served: NDArray[np.uint8], begin: int) -> int:
    """Return the first from ``begin`` on that is not served, or how many there are."""
    for at in range(begin, len(served), _AT_ONCE):
        is_left = served[at : at + _AT_ONCE] != SERVED
        first = int(is_left.argmax())
        if is_left[first]:
            return at + first
    return len(served)


class Marks:
    """What became of each access of one epoch. No lock is needed: each field has one writer.

    ``memory`` (``u8[Marks.bytes(length)]``) is shared, and used again for a later epoch: that is
    seen by its ``generation``. What is read from it counts only if the generation is still the
    same afterwards.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._head: NDArray[np.int64] = memory[: _HEAD * 8].view(np.int64)
        self.served = memory[_HEAD * 8 :]
        """``u8[length]``: 0, then :data:`STARTED`, then :data:`SERVED`, set by workers."""

    @staticmethod
    def bytes(length: int) -> int:
        """Return the bytes that the marks of ``length`` accesses take."""
        return _HEAD * 8 + length

    @property
    def generation(self) -> int:
        """How often this memory has been taken into use."""
        return int(self._head[0])

    @property
    def handed_out(self) -> int:
        """Accesses, from the first, that the prefetch process has seen to: none will be claimed."""
        return int(self._head[1])

    @property
    def is_full(self) -> bool:
        """Whether no more is handed out until something is served, or started, by a worker."""
        return bool(self._head[3])

    @property
    def is_attended(self) -> bool:
        """Whether the prefetch process was alive a moment ago, or is expected to start."""
        return int(self._head[2]) > time.monotonic_ns()

    @property
    def has_come(self) -> bool:
        """Whether the prefetch process has seen these marks."""
        return bool(self._head[4])

    def begin(self, expect: float) -> None:
        """Reset the memory for use; the prefetch process starts within ``expect`` seconds."""
        self._head[0] += 1  # first, so that no process takes the marks below for an older epoch's
        self.served[:] = 0
        self._head[[1, 3]] = 0
        self.attend(expect)
        self._head[4] = False

    def attend(self, seconds: float = _LIFE) -> None:
        """Mark the prefetch process as alive for so many seconds."""
        self._head[2] = time.monotonic_ns() + int(seconds * 1e9)
        self._head[4] = True

    def hand_out(self, end: int, is_full: bool = False) -> None:
        """Mark all accesses before ``end`` as claimed, or not to be claimed."""
        self._head[1] = end
        self._head[3] = is_full


class Progress:
    """What became of each access of an epoch, in memory that workers and prefetch share.

    ``length`` accesses at most in an epoch of this rank. Two epochs are kept, as prefetch is in
    the next one before this one ends. Workers write to places of their own, so that no process
    needs a lock; passed to children it stays the same memory.

    A worker leaves the reading to a prefetch process that gets on, and only waits: for as long as
    it would read alone, or without an end if its ``source`` would have to start something before
    it can read (``is_ready``). So does each with ``waits``: that process reads blocks, and a worker
    sample by sample. Only these wait for it to start: where a batch takes a worker longer than
    that, it has started during the first one.
    """

    def __init__(self, length: int, source: Source | None = None, *, waits: bool = False) -> None:
        self._memory = [
            SharedArray.create(Marks.bytes(length), "u1", name="stoker-marks") for _ in "01"
        ]
        self._source, self._waits = source, waits
        self._is_first = True

    def begin(self, epoch: int, *, is_held: bool = False) -> SharedArray:
        """Return the memory of the :class:`Marks` of ``epoch``, all zero.

        ``is_held``: nothing is read ahead for now, and no worker need wait for that.
        """
        is_coming = self._is_first and not is_held
        self._marks(epoch).begin(_STARTING if is_coming else 0.0)
        self._is_first = False
        return self.memory(epoch)

    def memory(self, epoch: int) -> SharedArray:
        """Return the memory of the :class:`Marks` of ``epoch``, which has begun."""
        return self._memory[epoch % 2]

    def leave_out(self, epoch: int, which: NDArray[np.bool_]) -> None:
        """Say, before they are published, which accesses bool[A] are not to be read ahead."""
        self._marks(epoch).served[: len(which)][which] = SERVED

    def start(self, epoch: int, first: int, count: int, alone: float = 0.0) -> None:
        """Mark these accesses as taken by a worker, which reads what is not claimed yet.

        ``alone``: seconds in which it would read all of them, as far as it knows.
        """
        marks = self._marks(epoch)
        if self._waits or (self._source is not None and not self._source.is_ready):
            alone = math.inf
        if alone and (alone == math.inf or marks.has_come):
            _await(marks, first, first + count, alone)
        marks.served[first : first + count] = STARTED

    def finish(self, epoch: int, first: int, count: int) -> None:
        """Mark these accesses as done."""
        self._marks(epoch).served[first : first + count] = SERVED

    def _marks(self, epoch: int) -> Marks:
        return Marks(self.memory(epoch).array)


def _await(marks: Marks, first: int, end: int, seconds: float) -> None:
    """Wait until the accesses ``first`` to ``end`` are handed out, as long as that gets on.

    For so many ``seconds`` at most.
    """
    reached, since = marks.handed_out, time.monotonic()
    until = since + seconds
    moved = since  # when the window last moved, or another process could have moved it
    while reached < end and marks.is_attended and time.monotonic() < min(until, since + _PATIENCE):
        if not marks.is_full or (marks.served[:first] != SERVED).any():
            moved = time.monotonic()
        elif time.monotonic() - moved > _NOTICED:
            return  # the window does not hold all of these
        time.sleep(_GLANCE)
        now = marks.handed_out
        if now > reached:
            reached = now
            moved = since = time.monotonic()
