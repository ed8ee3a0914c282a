"""Samples served through a Store, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.samples import Samples
from stoker.epoch.stage import Stage
from stoker.errors import SampleCorrupt, SourceError
from stoker.store.claims import Served, Turns
from stoker.store.guarded import NullTier
from stoker.store.registry import SharedArena, SharedArrays
from stoker.store.store import Store
from stoker.store.tier import Keys
from stoker.types import Outcome


class Fetched(NamedTuple):
    """A batch before its transforms."""

    ids: NDArray[np.uint32]
    """``u32[n]``, the samples really served."""
    decoded: list[Any]
    """What the transforms work on; None where there is an error."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    errors: dict[int, SourceError]
    """Place in the batch -> why that sample cannot be used."""


class CachedSamples:
    """The samples of ``dataset``, served through ``store`` a batch at a time.

    Worker processes of any start method share the store's cache; safe in any thread as far as
    decoding is.
    """

    def __init__(
        self,
        dataset: Samples,
        store: Store,
        stage: Stage,
        shared: Sequence[SharedArena | SharedArrays] = (),
    ) -> None:
        self.dataset = dataset
        self.store = store
        self.stage = stage
        self.shared = shared
        """What this process opened for it, closed with it."""

    def fetch(
        self, ids: NDArray[np.uint32], keys: Keys = None, turns: Turns | None = None
    ) -> Fetched:
        """Return samples ``u32[n]`` before their transforms, with one call of the store.

        ``keys`` are those of the cache policy after these accesses, and ``turns`` which ones of
        the epoch they are; None: some of the epoch in progress. A cached copy that does not decode
        is a miss. What cannot be read or decoded is reported in ``errors``; what cannot be decoded
        does not stay in the cache, as a later read may bring better bytes.
        """
        served = self.store.serve(ids, keys, turns)
        decoded, corrupt = self._decoded(served)
        outcomes = served.outcomes
        errors = {**served.errors, **corrupt}
        copied = [place for place in corrupt if self._was_copy(outcomes[place])]
        if copied:
            again = self.store.reread(served, copied)
            outcomes = outcomes.copy()
            outcomes[copied] = again.outcomes
            values, corrupt = self._decoded(again)
            failed = {**again.errors, **corrupt}
            for slot, place in enumerate(copied):
                decoded[place] = values[slot]
                del errors[place]
                if slot in failed:
                    errors[place] = failed[slot]
        useless = errors.keys() - served.errors.keys()
        if useless:
            self.store.discard(served.ids[list(useless)])
        return Fetched(served.ids, decoded, outcomes, errors)

    def _decoded(self, served: Served) -> tuple[list[Any], dict[int, SourceError]]:
        """Return each sample, None where there is an error, and what does not decode."""
        decoded: list[Any] = [None] * len(served)
        corrupt: dict[int, SourceError] = {}
        decode = self.stage.decoded
        data = served.data.data
        bounds = served.offsets.tolist()
        for place, index in enumerate(served.ids.tolist()):
            if place in served.errors:
                continue
            try:
                decoded[place] = decode(index, data[bounds[place] : bounds[place + 1]])
            except SampleCorrupt as error:
                corrupt[place] = error
        return decoded, corrupt

    def _was_copy(self, outcome: int) -> bool:
        """Whether the bytes may be others than the source has."""
        return outcome != Outcome.FETCHED or self.store.pool is not None

    def aside(self) -> CachedSamples:
        """Return the same samples through the same cache, for reads that are not training's.

        They are counted apart, and never served by another sample. It need not be closed.
        """
        store = Store(self.stage.source, self.store.tier, pool=self.store.pool)
        return CachedSamples(self.dataset, store, self.stage)

    def past_the_cache(self) -> CachedSamples:
        """Return the same samples without the cache, claimed and counted with these.

        None is served by another one but where that is its turn. It need not be closed.
        """
        own = self.store
        store = Store(
            self.stage.source,
            NullTier(own.tier.regions),
            places=own.places,
            substitution=None if own.claims is None else own.substitution,
            claims=own.claims,
        )
        store.counters = own.counters
        return CachedSamples(self.dataset, store, self.stage)

    def close(self) -> None:
        """Let go of the cache; reading afterwards raises SegmentError. May be called again."""
        self.store.close()
        for shared in self.shared:
            shared.close()

    def __getstate__(self) -> dict[str, Any]:
        # Being found by other jobs is the part of the process that opened the cache.
        return {**self.__dict__, "shared": ()}

    def __len__(self) -> int:
        return len(self.dataset)
