"""What a node reads its misses from: the pool, and for the rest the source."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stoker.errors import SourceError
from stoker.store.packed import Packed, gather, pick
from stoker.store.pool import PoolTier
from stoker.store.tier import Ids, Keys, Mask

if TYPE_CHECKING:
    from stoker.source.base import Source


class Brought(NamedTuple):
    """Samples that were not on this node."""

    samples: Packed
    """One that could not be read is empty."""
    errors: dict[int, SourceError]
    """Index in the batch -> why it could not be read."""
    pooled: Mask
    """Which came from the pool, without a read of the source."""
    source_seconds: float
    """Seconds that the source took."""


class Upstream:
    """Reads samples from ``pool``, if there is one, and what that has not from ``source``.

    What was read from the source is offered to the pool. As safe for threads and processes as
    both are.
    """

    def __init__(self, source: Source, pool: PoolTier | None = None) -> None:
        self._source = source
        self._pool = pool

    def read(self, ids: Ids, keys: Keys = None) -> Brought:
        """Return the samples ``ids`` (``u32[n]``, unique), with the keys they have from now on.

        Raises whatever the source raises beside SourceError.
        """
        if self._pool is None or not len(ids):
            return self._read_source(ids)
        held, pooled = self._pool.get_many(ids, keys)
        if pooled.all():
            return Brought(held, {}, pooled, 0.0)
        rest = np.flatnonzero(~pooled)
        read = self._read_source(ids[rest])
        good = np.ones(len(rest), np.bool_)
        good[list(read.errors)] = False
        if good.any():
            chosen = np.flatnonzero(good)
            some = None if keys is None else keys[rest[chosen]]
            self._pool.offer(ids[rest[chosen]], pick(read.samples, chosen), some)
        part, index = np.zeros(len(ids), np.int64), np.arange(len(ids))
        part[rest], index[rest] = 1, np.arange(len(rest))
        errors = {int(rest[place]): error for place, error in read.errors.items()}
        return Brought(
            gather([held, read.samples], part, index), errors, pooled, read.source_seconds
        )

    def _read_source(self, ids: Ids) -> Brought:
        begin = time.perf_counter()
        try:
            data, offsets, errors = self._source.read_packed(ids)
        except SourceError as error:
            data, offsets = np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64)
            errors = dict.fromkeys(range(len(ids)), error)
        seconds = time.perf_counter() - begin
        return Brought(Packed(data, offsets), errors, np.zeros(len(ids), np.bool_), seconds)
