"""How misses are read: once for all processes of a node, from the pool or from the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.source.base import read_whole
from stoker.source.packed import Packed, gather, pick
from stoker.store.claims import Served
from stoker.store.substitutes import Choice
from stoker.store.tier import Ids, Keys, Mask, Pool, RegionTier
from stoker.types import Outcome

if TYPE_CHECKING:
    from stoker.source.base import Source

_WAIT_SLICE = 0.25  # seconds between two looks for a pending KeyboardInterrupt
Slots = NDArray[np.int64]


class Brought(NamedTuple):
    """Samples that were not on this node."""

    samples: Packed
    """One that could not be read is empty."""
    errors: dict[int, SourceError]
    """Index in the batch -> why it could not be read."""
    pooled: Mask
    """Which came from the pool, and were not read from the source for that."""
    source_seconds: float
    """Seconds that the source took."""


class Meter:
    """What the threads of one process read from a source.

    ``totals`` (``f64[3]``), which other processes may share, counts the samples, the seconds in
    which at least one read was in progress, and the seconds of all reads, added up. One process at
    a time writes it. Thread-safe.
    """

    def __init__(self, totals: NDArray[Any]) -> None:
        self._totals = totals
        self._mutex = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def reading(self, count: int) -> Iterator[None]:
        """Count what happens inside as a read of so many samples."""
        self.begin()
        try:
            yield
        finally:
            self.end(count)

    def begin(self) -> None:
        """Note that a read begins."""
        with self._mutex:
            self._count(0)
            self._under_way += 1

    def end(self, count: int) -> None:
        """Note that it is over, and was of so many samples."""
        with self._mutex:
            self._count(count)
            self._under_way -= 1

    def _count(self, samples: int) -> None:
        """Count samples, and the time since reads last began or ended."""
        now = time.perf_counter()
        passed = now - self._since if self._under_way else 0.0
        self._totals += samples, passed, passed * self._under_way
        self._since = now


class Upstream:
    """Reads samples from ``pool``, if there is one, and the rest from ``source``.

    What was read from the source is offered to the pool. ``await_turn`` is called before a read of
    the source, with its ids, and returns when it may begin. As safe for threads and processes as
    these are.
    """

    def __init__(
        self,
        source: Source,
        pool: Pool | None = None,
        await_turn: Callable[[Ids], None] | None = None,
    ) -> None:
        self._source = source
        self._pool = pool
        self._await_turn = await_turn

    def read(self, ids: Ids, keys: Keys = None, meter: Meter | None = None) -> Brought:
        """Return the samples ``ids`` (``u32[n]``, unique), with the keys they have from now on.

        ``meter`` counts what is read from the source. Raises what the source raises, except
        SourceError.
        """
        if self._pool is None or not len(ids):
            return self._read_source(ids, meter)
        held, found, fetched, seconds = self._look(self._pool, ids, keys, meter)
        pooled = found & ~fetched
        if found.all():
            return Brought(held, {}, pooled, seconds)
        rest = np.flatnonzero(~found)
        read = self._read_source(ids[rest], meter)
        good = np.ones(len(rest), np.bool_)
        good[list(read.errors)] = False
        if good.any():
            chosen = np.flatnonzero(good)
            some = None if keys is None else keys[rest[chosen]]
            self._pool.offer(ids[rest[chosen]], pick(read.samples, chosen), some)
        part, index = np.zeros(len(ids), np.int64), np.arange(len(ids))
        part[rest], index[rest] = 1, np.arange(len(rest))
        errors = {int(rest[row]): error for row, error in read.errors.items()}
        return Brought(
            gather([held, read.samples], part, index),
            errors,
            pooled,
            seconds + read.source_seconds,
        )

    def _look(
        self, pool: Pool, ids: Ids, keys: Keys, meter: Meter | None
    ) -> tuple[Packed, Mask, Mask, float]:
        """Return what the pool has, and for how long the source was read for that."""
        if not pool.reads:
            return *pool.find(ids, keys), 0.0
        begin = time.perf_counter()
        if meter is not None:
            meter.begin()
        count = 0
        try:
            samples, found, fetched = pool.find(ids, keys)
            count = int(np.count_nonzero(fetched))
        finally:
            if meter is not None:
                meter.end(count)
        return samples, found, fetched, time.perf_counter() - begin if count else 0.0

    def _read_source(self, ids: Ids, meter: Meter | None) -> Brought:
        if self._await_turn is not None and len(ids):
            self._await_turn(ids)
        begin = time.perf_counter()
        try:
            with nullcontext() if meter is None else meter.reading(len(ids)):
                data, offsets, errors = read_whole(self._source, ids)
        except SourceError as error:
            data, offsets = np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64)
            errors = dict.fromkeys(range(len(ids)), error)
        seconds = time.perf_counter() - begin
        return Brought(Packed(data, offsets), errors, np.zeros(len(ids), np.bool_), seconds)


def await_others(tier: RegionTier, ids: Ids, seconds: float) -> float:
    """Wait for the claimants of ``ids``, so many seconds at most; return how many it took."""
    begin = time.perf_counter()
    waiting = ids
    while waiting.size and (now := time.perf_counter()) < begin + seconds:
        span = min(_WAIT_SLICE, begin + seconds - now)
        waiting = waiting[~tier.wait(waiting, span)]
        if time.perf_counter() - now < span:
            break  # no process is at work on those any more
    return time.perf_counter() - begin


class Flight:
    """Brings in the samples ``ids`` (``u32[n]``, unique) that a tier did not have.

    :meth:`run` claims them, reads those it claimed in one read and publishes them, and only then
    waits for those that others had claimed, ``wait_seconds`` in all; it reads the rest
    without waiting. Claims are given back in any case. One use, one thread.
    """

    def __init__(
        self,
        upstream: Upstream,
        tier: RegionTier,
        ids: Ids,
        keys: Keys,
        wait_seconds: float,
    ) -> None:
        self.ids = ids
        self.parts: list[Packed] = []
        """The buffers that the samples lie in."""
        self.part = np.zeros(len(ids), np.int64)
        """``i64[n]``: which of ``parts`` holds the sample."""
        self.index = np.zeros(len(ids), np.int64)
        """``i64[n]``: which sample of that buffer it is."""
        self.outcomes = np.full(len(ids), Outcome.FETCHED, np.int8)
        """``i8[n]``: FETCHED if read here, HIT if it came from the pool or another process."""
        self.errors: dict[int, SourceError] = {}
        """Index in ``ids`` -> why it could not be read; the sample is empty."""
        self.read = 0
        """Samples that were asked of the source here, in :attr:`source_seconds`."""
        self.source_seconds = 0.0
        self.wait_seconds = 0.0
        self._upstream = upstream
        self._tier = tier
        self._keys = keys
        self._wait_limit = wait_seconds

    def run(self) -> None:
        """Bring in all samples. Raises what the source raises, except SourceError."""
        others = self._read(np.arange(len(self.ids)), claimed_only=True)
        if others.size:
            others = self._wait(others)
        if others.size:
            self._read(others, claimed_only=False)

    def _read(self, slots: Slots, *, claimed_only: bool) -> Slots:
        """Read and publish the slots that can be claimed; return the others.

        Unless ``claimed_only``, the others are read too, without being published.
        """
        ids = unpublished = self.ids[slots]
        try:
            own = self._tier.claim(ids)
            unpublished = ids[own]
            rows = np.flatnonzero(own) if claimed_only else np.arange(len(slots))
            if rows.size:
                read, good = self._read_source(slots[rows])
                keep = good if claimed_only else good & own
                if keep.any():
                    samples = read if keep.all() else pick(read, np.flatnonzero(keep))
                    kept = rows[keep]
                    admitted = self._tier.put_many(ids[kept], samples, self._keys_of(slots[kept]))
                    left = own.copy()
                    left[kept[admitted]] = False
                    unpublished = ids[left]
        finally:
            # Reached on KeyboardInterrupt too: a claim left behind stalls every other process.
            if unpublished.size:
                self._tier.abandon(unpublished)
        return slots[~own]

    def _read_source(self, slots: Slots) -> tuple[Packed, NDArray[np.bool_]]:
        """Read slots in one go, and return them with which could be read."""
        brought = self._upstream.read(self.ids[slots], self._keys_of(slots))
        self.read += int(np.count_nonzero(~brought.pooled))
        self.source_seconds += brought.source_seconds
        self._arrived(slots, brought.samples, np.arange(len(slots)))
        self.outcomes[slots[brought.pooled]] = Outcome.HIT
        good = np.ones(len(slots), np.bool_)
        for index, why in brought.errors.items():
            good[index] = False
            self.errors[int(slots[index])] = why
        return brought.samples, good

    def _wait(self, slots: Slots) -> Slots:
        """Wait for the claimants of slots and take what they brought; return the rest."""
        self.wait_seconds += await_others(self._tier, self.ids[slots], self._wait_limit)
        brought, found = self._tier.get_many(self.ids[slots], self._keys_of(slots))
        self._arrived(slots[found], brought, np.flatnonzero(found))
        self.outcomes[slots[found]] = Outcome.HIT
        return slots[~found]

    def _keys_of(self, slots: Slots) -> Keys:
        return None if self._keys is None else self._keys[slots]

    def _arrived(self, slots: Slots, packed: Packed, index: Slots) -> None:
        self.part[slots] = len(self.parts)
        self.index[slots] = index
        self.parts.append(packed)


class Completer:
    """Completes batches of which ``tier`` has a part by flights; see :class:`Flight`."""

    def __init__(self, upstream: Upstream, tier: RegionTier, wait_seconds: float) -> None:
        self._upstream, self._tier, self._wait_seconds = upstream, tier, wait_seconds

    def complete(
        self, batch: Ids, cached: Packed, found: Mask, keys: Keys, choice: Choice | None
    ) -> tuple[Served, Flight]:
        """Return the samples ``batch`` (``u32[n]``), or those of ``choice``, and what brought them.

        ``cached`` has those ``found`` (``bool[n]``). ``keys`` (``f64[n]``) are those that the
        samples asked for have from now on. Raises what the source raises, except SourceError.
        """
        wanted = batch if choice is None else choice.ids
        missing = np.flatnonzero(~found if choice is None else choice.missing)
        ids, first, inverse = _distinct(wanted[missing])
        asked = batch[missing[first]]
        # The keys are those of the samples asked for: of others none is known.
        own = None if keys is None else np.where(ids == asked, keys[missing[first]], -np.inf)
        flight = Flight(self._upstream, self._tier, ids, own, self._wait_seconds)
        if ids.size:
            flight.run()
        part, index, parts = np.zeros(len(batch), np.int64), np.arange(len(batch)), [cached]
        part[missing], index[missing] = 1 + flight.part[inverse], flight.index[inverse]
        parts += flight.parts
        outcomes = np.full(len(batch), Outcome.HIT, np.int8)
        outcomes[missing[first]] = flight.outcomes
        if choice is not None:
            part[choice.taken], index[choice.taken] = len(parts), np.arange(len(choice.taken))
            parts.append(choice.samples)
            outcomes[(wanted != batch) & (outcomes == Outcome.HIT)] = Outcome.SUBSTITUTED
        errors = {}
        if flight.errors:
            errors = {
                row: flight.errors[slot]
                for row, slot in zip(missing.tolist(), inverse.tolist(), strict=True)
                if slot in flight.errors
            }
        return Served(wanted, *gather(parts, part, index), outcomes, errors), flight


def _distinct(ids: Ids) -> tuple[Ids, NDArray[np.int64], NDArray[np.int64]]:
    """Return distinct ids as they first appear, where that is, and for each id which it is.

    In the order asked for, not sorted, so that what is read needs no rearranging.
    """
    ascending = np.sort(ids)
    if not (ascending[1:] == ascending[:-1]).any():  # as nearly always, and found much sooner
        each = np.arange(len(ids))
        return ids, each, each
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    return ids[first], first, rank[inverse]
