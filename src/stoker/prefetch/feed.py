"""What one rank is going to read, and how much of it may lie ready."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]


_GROUPS = 4  # fill a window at least

STARTED, SERVED = 1, 2
"""What a worker says of an access: it sees to it itself now; it needs the cached copy no more."""


class Segment(NamedTuple):
    """One epoch of a rank's coming accesses."""

    epoch: int
    ids: Ids
    """``u32[A]``, in the order of access."""
    keys: NDArray[np.float64] | None
    """``f64[A]``, under which each sample is kept after its access; None: the policy needs none."""
    served: NDArray[np.uint8]
    """``u8[A]``, shared with the rank's workers, who set :data:`STARTED`, then :data:`SERVED`."""


class Group(NamedTuple):
    """Accesses that are fetched together."""

    ids: Ids
    keys: NDArray[np.float64] | None
    position: int
    """Of the last one, counted since the feed began."""


class Feed:
    """The accesses of one rank still to come, and a window over them.

    The window begins with the first group that is not all served and holds ``window_bytes`` at
    most, but always one sample. Workers serve in any order within it. Not thread-safe.
    """

    def __init__(self, sizes: NDArray[np.int64], window_bytes: int) -> None:
        self._sizes = sizes
        self._window_bytes = window_bytes
        self._segments: deque[Segment] = deque()
        self._ends: deque[NDArray[np.int64]] = deque()
        self._base = 0  # accesses in segments that are over
        self._low = 0  # in the first segment: nothing before it is unserved
        self._head = 0  # in all segments: nothing from it on was handed out
        # Handed out and not over: first, end, bytes. What workers see to takes up no room.
        self._groups: deque[tuple[int, int, int]] = deque()
        self._ready = 0  # bytes of those groups

    def add(self, segment: Segment) -> None:
        """Append an epoch."""
        self._segments.append(segment)
        self._ends.append(np.cumsum(self._sizes[segment.ids], dtype=np.int64))

    def reset(self) -> None:
        """Forget all accesses, because the rank goes elsewhere."""
        self._base += sum(len(segment.ids) for segment in self._segments)
        self._segments.clear()
        self._ends.clear()
        self._groups.clear()
        self._low = self._head = self._ready = 0

    def resize(self, window_bytes: int) -> None:
        """Hand out no more than this from now on; what lies ready stays."""
        self._window_bytes = window_bytes

    @property
    def epochs(self) -> list[int]:
        """The epochs that are not over."""
        return [segment.epoch for segment in self._segments]

    def advance(self) -> int:
        """Look at what was served, and return the position up to which all groups are over."""
        while self._segments:
            served = self._segments[0].served
            over = served[self._low :] == SERVED
            done = len(over) if over.all() else int(np.argmin(over))
            self._low += done
            if self._low < len(served):
                break
            self._base += len(served)
            self._head = max(0, self._head - len(served))
            self._low = 0
            self._segments.popleft()
            self._ends.popleft()
        self._head = max(self._head, self._low)
        position = self._base + self._low
        while self._groups and self._groups[0][1] <= position:
            self._ready -= self._groups.popleft()[2]
        return min(position, self._groups[0][0]) if self._groups else position

    def take(self, most: int) -> Group | None:
        """Return the next accesses, at most ``most``, that the window has room for."""
        offset = self._head
        for segment, ends in zip(self._segments, self._ends, strict=True):
            if offset < len(segment.ids):
                return self._take_from(segment, ends, offset, most)
            offset -= len(segment.ids)
        return None

    def _take_from(
        self, segment: Segment, ends: NDArray[np.int64], begin: int, most: int
    ) -> Group | None:
        # A group takes up its room until all of it is served, so small windows get small groups.
        room = min(self._window_bytes - self._ready, self._window_bytes // _GROUPS)
        before = int(ends[begin - 1]) if begin else 0
        end = begin + int(np.searchsorted(ends[begin : begin + most], before + room, "right"))
        if end == begin:
            alone = int(ends[begin]) - before > self._window_bytes // _GROUPS
            if self._groups and (
                not alone or self._ready + int(ends[begin]) - before > self._window_bytes
            ):
                return None
            end = begin + 1
        wanted = begin + np.flatnonzero(segment.served[begin:end] == 0)
        ids = segment.ids[wanted]
        num_bytes = int(self._sizes[ids].sum())
        first = self._base + self._head
        self._groups.append((first, first + end - begin, num_bytes))
        self._ready += num_bytes
        self._head += end - begin
        return Group(
            ids,
            None if segment.keys is None else segment.keys[wanted],
            self._base + self._head - 1,
        )
