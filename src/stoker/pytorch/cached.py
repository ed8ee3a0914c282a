"""A map-style data set whose samples come through a Store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SampleCorrupt, SourceError
from stoker.pytorch.dataset import BatchDataset, SourceDataset
from stoker.pytorch.stage import Stage
from stoker.store.null import NullTier
from stoker.store.registry import SharedArena
from stoker.store.shared_arrays import SharedArrays
from stoker.store.store import Store
from stoker.store.tier import Keys


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


class CachedDataset(BatchDataset):
    """The samples of ``dataset``, served through ``store`` a batch at a time.

    :func:`~stoker.pytorch.with_cache` makes one. It works in any loader that takes a
    map-style data set: torch's DataLoader, torchdata's StatefulDataLoader, Subset. Indices are
    ids of ``dataset``. Worker processes of any start method share the store's cache; safe in
    any thread as far as the data set's transforms are.
    """

    def __init__(
        self,
        dataset: SourceDataset,
        store: Store,
        stage: Stage,
        shared: Sequence[SharedArena | SharedArrays] = (),
    ) -> None:
        self.dataset = dataset
        self.store = store
        self.stage = stage
        self._shared = shared

    def fetch(self, ids: NDArray[np.uint32], keys: Keys = None) -> Fetched:
        """Return samples ``u32[n]`` before their transforms, with one call of the store.

        ``keys`` are those of the cache policy after these accesses. What cannot be read or
        decoded is reported in ``errors``; what cannot be decoded does not stay in the cache, as
        a later read may bring better bytes.
        """
        served = self.store.serve(ids, keys)
        errors = dict(served.errors)
        decoded: list[Any] = [None] * len(served)
        decode = self.stage.decoded
        data = served.data.data
        bounds = served.offsets.tolist()
        for place, index in enumerate(served.ids.tolist()):
            if place in errors:
                continue
            try:
                decoded[place] = decode(index, data[bounds[place] : bounds[place + 1]])
            except SampleCorrupt as error:
                errors[place] = error
        if len(errors) > len(served.errors):
            self.store.discard(served.ids[list(errors.keys() - served.errors.keys())])
        return Fetched(served.ids, decoded, served.outcomes, errors)

    def aside(self) -> CachedDataset:
        """Return the same samples through the same cache, for reads that are not training's.

        They are counted apart, and never served by another sample. It need not be closed.
        """
        store = Store(self.stage.source, self.store.tier, pool=self.store.pool)
        return CachedDataset(self.dataset, store, self.stage)

    def past_the_cache(self) -> CachedDataset:
        """Return the same samples without the cache, counted with these. It need not be closed."""
        store = Store(self.stage.source, NullTier())
        store.counters = self.store.counters
        return CachedDataset(self.dataset, store, self.stage)

    def close(self) -> None:
        """Let go of the cache; reading afterwards raises SegmentError. May be called again."""
        self.store.close()
        for shared in self._shared:
            shared.close()

    def __getstate__(self) -> dict[str, Any]:
        # Being found by other jobs is the part of the process that opened the cache.
        return {**self.__dict__, "_shared": ()}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, with their transforms applied.

        Raises a :class:`~stoker.errors.SourceError` for the first one that cannot be used.
        """
        fetched = self.fetch(np.asarray(indices, np.uint32))
        if fetched.errors:
            raise fetched.errors[min(fetched.errors)]
        finish = self.dataset.finish
        return [finish(*pair) for pair in zip(fetched.ids.tolist(), fetched.decoded, strict=True)]
