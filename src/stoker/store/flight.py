"""The missing samples of one batch: fetched once between all processes that want them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.source.packed import Packed, pick
from stoker.store.tier import Ids, Keys, Pool, RegionTier
from stoker.store.upstream import Upstream
from stoker.types import Outcome

if TYPE_CHECKING:
    from stoker.source.base import Source

_WAIT_SLICE = 0.25  # seconds between two looks for a pending KeyboardInterrupt

Slots = NDArray[np.int64]


class Flight:
    """Brings in the samples ``ids`` (``u32[n]``, unique) that a tier did not have.

    :meth:`run` claims them, reads what it got in one read and publishes it, and only then
    waits for those that others had claimed, ``wait_seconds`` in all; what is missing even then
    it reads without waiting. Claims are given back whatever happens. One use, one thread.
    ``pool``: where samples are looked for before the source.
    """

    def __init__(
        self,
        source: Source,
        tier: RegionTier,
        ids: Ids,
        keys: Keys,
        wait_seconds: float,
        pool: Pool | None = None,
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
        self._upstream = Upstream(source, pool)
        self._tier = tier
        self._keys = keys
        self._wait_limit = wait_seconds

    def run(self) -> None:
        """Bring in all samples. Raises whatever the source raises beside SourceError."""
        others = self._read(np.arange(len(self.ids)), claimed_only=True)
        if others.size:
            others = self._wait(others)
        if others.size:
            self._read(others, claimed_only=False)

    def _read(self, slots: Slots, *, claimed_only: bool) -> Slots:
        """Read and publish the slots that can be claimed; return the others.

        Unless ``claimed_only``, the others are read too, without being published.
        """
        unpublished = self.ids[slots]
        try:
            own = self._tier.claim(unpublished)
            unpublished = unpublished[own]
            reading = slots[own] if claimed_only else slots
            if reading.size:
                read, good = self._read_source(reading)
                keep = good if claimed_only else good & own
                if keep.any():
                    samples = read if keep.all() else pick(read, np.flatnonzero(keep))
                    kept = self.ids[reading[keep]]
                    keys = self._keys_of(reading[keep])
                    published = kept[self._tier.put_many(kept, samples, keys)]
                    unpublished = np.setdiff1d(unpublished, published, assume_unique=True)
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
        begin = time.perf_counter()
        deadline = begin + self._wait_limit
        waiting = self.ids[slots]
        while waiting.size and (now := time.perf_counter()) < deadline:
            span = min(_WAIT_SLICE, deadline - now)
            waiting = waiting[~self._tier.wait(waiting, span)]
            if time.perf_counter() - now < span:
                break  # nobody is at work on those any more
        self.wait_seconds += time.perf_counter() - begin
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
