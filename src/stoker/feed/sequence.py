"""Samples by index through a cache, for loaders that choose the order themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import context
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from stoker.epoch.cached import CachedSamples
from stoker.epoch.ranks import alone, launched_ranks
from stoker.epoch.settings import Cache, Population, Size, as_cache
from stoker.epoch.setup import setup_without_plan
from stoker.epoch.stage import Decode
from stoker.errors import ConfigError
from stoker.feed.samples import FeedSamples
from stoker.recipes.base import Recipe
from stoker.source.base import Source


class CachedSequence(CachedSamples):
    """Samples by index, through a cache: what :func:`with_cache` returns.

    ``sequence[i]`` is sample ``i``, decoded, or ``(sample, target)`` where there are targets: a
    ``RandomAccessDataSource`` of Grain, and what else takes ``__len__`` and ``__getitem__``. Safe
    in any thread as far as the decoder is. One of a path may be pickled for any process, which
    opens the same cache again; another one only for a process that is being started.
    """

    def __init__(self, cached: CachedSamples, again: Callable[[], CachedSequence] | None) -> None:
        """``again`` makes the same in another process, if that is possible."""
        super().__init__(cached.dataset, cached.store, cached.stage, cached.shared)
        self._again = again

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return a sample; negative indices count from the end.

        Raises IndexError out of range, and a :class:`~stoker.errors.SourceError` for a sample
        that cannot be used.
        """
        place, length = index.__index__(), len(self)
        if not -length <= place < length:
            raise IndexError(f"index {place} is out of range: there are {length} samples")
        return self._getitems([place % length])[0]

    def _getitems(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Return several samples with one read; Grain calls it so for a batch."""
        fetched = self.fetch(np.array([index.__index__() for index in indices], np.uint32))
        if fetched.errors:
            raise fetched.errors[min(fetched.errors)]
        targets = self.dataset.targets  # type: ignore[attr-defined]
        if targets is None:
            return fetched.decoded
        return [*zip(fetched.decoded, targets[fetched.ids], strict=True)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._again is None or context.get_spawning_popen() is not None:
            return super().__reduce_ex__(protocol)
        return self._again, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def with_cache(
    source: Source | str | Path,
    cache: Cache | Size = "20%",
    *,
    decode: Decode | None = None,
    targets: ArrayLike | None = None,
    recipe: str | Recipe | None = None,
) -> CachedSequence:
    """Return the samples of ``source`` by index, with a cache in front.

    For Grain and other loaders that choose the order themselves; arguments are those of a
    :class:`Feed`. As the order is not known, the default of ``recipe`` is ``minio``, and nothing
    is read ahead. ``close()`` it when done.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, and for what needs a plan,
    which a Feed has; :class:`~stoker.errors.CapacityError` when the memory is not there.
    """
    samples = FeedSamples(source, decode, targets)
    if not len(samples):
        raise ConfigError("the source has 0 samples: there is nothing to cache")
    setup = setup_without_plan(samples, Population(len(samples)), as_cache(cache), recipe)
    again = None
    if isinstance(source, str | Path):
        again = partial(with_cache, source, cache, decode=decode, targets=targets, recipe=recipe)
    return CachedSequence(setup.open(launched_ranks(), alone), again)
