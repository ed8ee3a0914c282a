"""Ranges that lie close together, read by one request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.source.packed import Offsets


@dataclass(frozen=True, eq=False)
class Requests:
    """R requests that cover n ranges."""

    shards: npt.NDArray[np.uint32]
    """The object of each request, u32[R]."""
    starts: Offsets
    """Where it begins, i64[R]."""
    lengths: Offsets
    """Bytes of it, i64[R]."""
    request_of: Offsets
    """The request that covers each range, i64[n]."""


def coalesce(
    shards: npt.NDArray[np.uint32], starts: Offsets, ends: Offsets, gap: int, largest: int
) -> Requests:
    """Return requests that cover the ranges ``[starts, ends)`` of these ``shards``.

    Ranges of one shard with at most ``gap`` bytes between them come in one request, as long as
    it has at most ``largest`` bytes; a single range may be larger.
    """
    order = np.lexsort((starts, shards))
    if not len(order):
        none = np.empty(0, np.int64)
        return Requests(none.astype(np.uint32), none, none, none)
    of, begins, stops = shards[order], starts[order], ends[order]
    is_other = of[1:] != of[:-1]
    firsts = np.append(0, 1 + np.flatnonzero(is_other | (begins[1:] - stops[:-1] > gap)))
    lengths = stops[np.append(firsts[1:], len(order)) - 1] - begins[firsts]
    if lengths.max() > largest or not (is_other | (np.diff(stops) >= 0)).all():
        return _one_by_one(order, shards, starts, ends, gap, largest)
    request_of = np.empty(len(order), np.int64)
    request_of[order] = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(order)))
    return Requests(of[firsts], begins[firsts], lengths, request_of)


def _one_by_one(
    order: npt.NDArray[np.int64],
    shards: npt.NDArray[np.uint32],
    starts: Offsets,
    ends: Offsets,
    gap: int,
    largest: int,
) -> Requests:
    """Return the requests where ranges lie in others, or some would be too large."""
    request_of = np.empty(len(order), np.int64)
    joined: list[tuple[int, int, int]] = []
    ranges = zip(
        order.tolist(),
        shards[order].tolist(),
        starts[order].tolist(),
        ends[order].tolist(),
        strict=True,
    )
    shard, begin, end = -1, 0, 0
    for index, here, start, stop in ranges:
        close = here == shard and start - end <= gap and max(end, stop) - begin <= largest
        if not close:
            if shard >= 0:
                joined.append((shard, begin, end))
            shard, begin, end = here, start, stop
        end = max(end, stop)
        request_of[index] = len(joined)
    if shard >= 0:
        joined.append((shard, begin, end))
    table = np.array(joined, np.int64).reshape(-1, 3)
    return Requests(
        table[:, 0].astype(np.uint32), table[:, 1].copy(), table[:, 2] - table[:, 1], request_of
    )
