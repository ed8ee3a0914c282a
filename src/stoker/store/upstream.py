"""What a node reads its misses from: the pool, and for the rest the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.source.base import read_whole
from stoker.source.packed import Packed, gather, pick
from stoker.store.tier import Ids, Keys, Mask, Pool

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


class Meter:
    """What the threads of one process read from a source.

    ``totals`` (``f64[2]``), which others may share, counts the samples, and the seconds in which
    a read or more were under way. One process at a time writes it. Thread-safe.
    """

    def __init__(self, totals: NDArray[Any]) -> None:
        self._totals = totals
        self._mutex = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def reading(self, count: int) -> Iterator[None]:
        """Count what happens inside as a read of so many samples."""
        with self._mutex:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._mutex:
                now = time.perf_counter()
                self._totals += count, now - self._since
                self._since = now
                self._under_way -= 1


class Upstream:
    """Reads samples from ``pool``, if there is one, and what that has not from ``source``.

    What was read from the source is offered to the pool. As safe for threads and processes as
    both are.
    """

    def __init__(self, source: Source, pool: Pool | None = None) -> None:
        self._source = source
        self._pool = pool

    def read(self, ids: Ids, keys: Keys = None, meter: Meter | None = None) -> Brought:
        """Return the samples ``ids`` (``u32[n]``, unique), with the keys they have from now on.

        ``meter`` is told what is read from the source. Raises whatever the source raises beside
        SourceError.
        """
        if self._pool is None or not len(ids):
            return self._read_source(ids, meter)
        held, pooled = self._pool.get_many(ids, keys)
        if pooled.all():
            return Brought(held, {}, pooled, 0.0)
        rest = np.flatnonzero(~pooled)
        read = self._read_source(ids[rest], meter)
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

    def _read_source(self, ids: Ids, meter: Meter | None) -> Brought:
        begin = time.perf_counter()
        try:
            with nullcontext() if meter is None else meter.reading(len(ids)):
                data, offsets, errors = read_whole(self._source, ids)
        except SourceError as error:
            data, offsets = np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64)
            errors = dict.fromkeys(range(len(ids)), error)
        seconds = time.perf_counter() - begin
        return Brought(Packed(data, offsets), errors, np.zeros(len(ids), np.bool_), seconds)
