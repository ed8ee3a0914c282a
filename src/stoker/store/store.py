"""The store: serves batches from a tier, and what it misses from the source."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError, SegmentError
from stoker.shared import SharedArray
from stoker.source.adapt import as_source
from stoker.source.base import Source, check_ids
from stoker.store.counters import Counters
from stoker.store.flight import Flight
from stoker.store.guarded import GuardedTier
from stoker.store.packed import Packed, gather
from stoker.store.served import Served
from stoker.store.tier import Ids, Keys, Tier
from stoker.types import Outcome

FIELDS = (
    "accesses",
    "hits",
    "substituted",
    "fetched",
    "packaged",
    "failed",
    "bypassed",
    "bytes_from_cache",
    "bytes_from_source",
    "source_seconds",
    "wait_seconds",
)
"""What is counted, per process, and summed by :meth:`Store.stats`."""


class Store:
    """Serves samples by id: from ``tier`` when it has them, else from ``source``.

    A sample that several processes miss at once is read by one of them; the others wait for
    it, ``wait_seconds`` at most, and then read it themselves. A failing tier is bypassed: that
    costs speed, never the run. Safe in any thread; forked children and processes that receive
    the store by pickling share tier and counters. Also a context manager.

    Raises :class:`~stoker.errors.ConfigError` for a source without samples.
    """

    def __init__(self, source: Source, tier: Tier, *, wait_seconds: float = 10.0) -> None:
        self.source = as_source(source)
        if len(self.source) == 0:
            raise ConfigError("the source has 0 samples: there is nothing to serve")
        if not wait_seconds >= 0:
            raise ConfigError(f"wait_seconds={wait_seconds!r} is not a time: use 0 or more seconds")
        self.tier = tier
        self.counters = Counters(FIELDS)
        self._wait_seconds = wait_seconds
        self._fresh: SharedArray | None = None
        self._closed = False
        self._guard()

    def serve(self, ids: ArrayLike, keys: Keys = None) -> Served:
        """Return the samples ``ids`` (integers ``[n]``), in that order; repeats are welcome.

        ``keys`` (``f64[n]``) are those of the cache policy after these accesses, where it needs
        any. A sample that cannot be read is reported in ``errors`` of the result, not raised. The
        first access to an id that is not cached is FETCHED; repeats of it in the same batch,
        and samples that another process was fetching, are HIT.

        Raises :class:`~stoker.errors.ConfigError` for ids out of range and
        :class:`~stoker.errors.SegmentError` after :meth:`close`.
        """
        if self._closed:
            raise SegmentError("the store is closed: make a new one to read samples")
        batch = check_ids(ids, len(self.source))
        cached, found = self._tier.get_many(batch, keys)
        if not found.all():
            return self._serve_misses(batch, cached, found, keys)
        outcomes = np.full(len(batch), Outcome.HIT, np.int8)
        self._count(batch, cached.offsets, outcomes, {})
        return Served(batch, cached.data, cached.offsets, outcomes)

    def discard(self, ids: ArrayLike) -> None:
        """Forget the cached copies of ``ids``, which were found to be of no use."""
        self._tier.discard(check_ids(ids, len(self.source)))

    def expect_prefetch(self) -> SharedArray:
        """Return ``u8[N]`` where who prefetches sets 1 at what it reads for a coming access.

        That access then counts as FETCHED. Call it before the store is passed to other processes.
        """
        if self._fresh is None:
            self._fresh = SharedArray.create(len(self.source), np.uint8, name="stoker-fresh")
        return self._fresh

    def stats(self) -> dict[str, Any]:
        """Return what all processes counted so far, and the tier's own counters.

        ``accesses`` = ``hits`` + ``substituted`` + ``fetched`` + ``packaged``; ``failed`` reads
        are none of these; ``bypassed`` counts failures of the tier; bytes in bytes, time in
        seconds summed over processes. ``tier`` holds :meth:`Tier.stats`.
        """
        totals: dict[str, Any] = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in self.counters.totals().items()
        }
        return {**totals, "tier": {} if self._closed else self._tier.stats()}

    def close(self) -> None:
        """Close the tier; :meth:`stats` goes on working. May be called again."""
        if not self._closed:
            self._closed = True
            self.tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_tier"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard()

    def _guard(self) -> None:
        self._tier = GuardedTier(self.tier, lambda: self.counters.add(bypassed=1))

    def _serve_misses(
        self, batch: Ids, cached: Packed, found: NDArray[np.bool_], keys: Keys
    ) -> Served:
        missing = np.flatnonzero(~found)
        ids, first, inverse = _distinct(batch[missing])
        own_keys = None if keys is None else keys[missing[first]]
        flight = Flight(self.source, self._tier, ids, own_keys, self._wait_seconds)
        flight.run()
        part = np.zeros(len(batch), np.int64)
        index = np.arange(len(batch))
        part[missing] = 1 + flight.part[inverse]
        index[missing] = flight.index[inverse]
        samples = gather([cached, *flight.parts], part, index)
        outcomes = np.full(len(batch), Outcome.HIT, np.int8)
        outcomes[missing[first]] = flight.outcomes
        errors = {}
        if flight.errors:
            errors = {
                int(place): flight.errors[int(slot)]
                for place, slot in zip(missing, inverse, strict=True)
                if int(slot) in flight.errors
            }
        self.counters.add(source_seconds=flight.source_seconds, wait_seconds=flight.wait_seconds)
        self._count(batch, samples.offsets, outcomes, errors)
        return Served(batch, samples.data, samples.offsets, outcomes, errors)

    def _count(
        self,
        batch: Ids,
        offsets: NDArray[np.int64],
        outcomes: NDArray[np.int8],
        errors: dict[int, Any],
    ) -> None:
        """Set the outcomes of what was prefetched, and count."""
        if self._fresh is not None:
            # What was read here is counted already: then the mark is a later access's.
            due = np.flatnonzero((self._fresh.array[batch] == 1) & (outcomes == Outcome.HIT))
            if due.size:
                due = due[np.unique(batch[due], return_index=True)[1]]
                outcomes[due] = Outcome.FETCHED
                self._fresh.array[batch[due]] = 0
        good = np.ones(len(outcomes), np.bool_)
        good[list(errors)] = False
        hit = good & (outcomes == Outcome.HIT)
        lengths = np.diff(offsets)
        from_cache = int(lengths[hit].sum())
        self.counters.add(
            accesses=int(good.sum()),
            hits=int(hit.sum()),
            fetched=int((good & ~hit).sum()),
            failed=len(errors),
            bytes_from_cache=from_cache,
            bytes_from_source=int(offsets[-1]) - from_cache,
        )


def _distinct(ids: Ids) -> tuple[Ids, NDArray[np.int64], NDArray[np.int64]]:
    """Return distinct ids as they first appear, where that is, and for each id which it is.

    In the order asked for, not sorted, so that what is read needs no rearranging.
    """
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = first[order]
    return ids[first], first, place[inverse]
