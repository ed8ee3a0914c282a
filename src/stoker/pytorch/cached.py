"""A map-style data set whose samples come through a cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.epoch.cached import CachedSamples
from stoker.epoch.settings import Cache, Size, as_cache
from stoker.epoch.setup import setup_without_plan
from stoker.images import Canvas
from stoker.pytorch.dataset import BatchDataset, DatasetPopulation, SourceDataset
from stoker.pytorch.ranks import current_ranks, from_rank_zero
from stoker.recipes import Recipe


class CachedDataset(CachedSamples, BatchDataset):
    """Samples served through a cache, a batch at a time.

    :func:`~stoker.pytorch.with_cache` makes one. It works in any loader that takes a
    map-style data set: torch's DataLoader, torchdata's StatefulDataLoader, Subset. Indices are
    ids of the data set. Worker processes of any start method share the cache; safe in
    any thread as far as the data set's transforms are.
    """

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples ``indices``, with their transforms applied.

        Raises a :class:`~stoker.errors.SourceError` for the first one that cannot be used.
        """
        transform = self.dataset.image_transform
        canvas = None
        if transform is not None:
            canvas = Canvas(transform, [random.getrandbits(64) for _ in indices])
        fetched = self.fetch(np.asarray(indices, np.uint32), canvas=canvas)
        if fetched.errors:
            raise fetched.errors[min(fetched.errors)]
        finish = self.dataset.finish
        return [finish(*pair) for pair in zip(fetched.ids.tolist(), fetched.decoded, strict=True)]


def with_cache(
    dataset: SourceDataset, cache: Cache | Size = "20%", *, recipe: str | Recipe | None = None
) -> CachedDataset:
    """Return ``dataset`` with a cache in front, for use without a :class:`Loader`.

    For torch's DataLoader, torchdata's StatefulDataLoader and others. Arguments and errors are
    those of a Loader with a sampler of one's own, whose order is not known either: the default of
    ``recipe`` is ``minio``, and its sampling is not used. What needs a Loader raises ConfigError: a
    Cache with ``prefetch``, ``fetchers``, ``locality`` or ``sharing`` of its own. ``close()`` it
    when done.
    Where ranks of torch.distributed wrap a data set without a name, all of them must call this.
    """
    setup = setup_without_plan(dataset, DatasetPopulation(dataset), as_cache(cache), recipe)
    cached = setup.open(current_ranks(), from_rank_zero)
    return CachedDataset(cached.dataset, cached.store, cached.stage, cached.shared)
