"""What a Feed makes of a source; and these samples by index, for loaders that choose the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import context
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from stoker.epoch.cached import CachedSamples
from stoker.epoch.ranks import alone, launched_ranks
from stoker.epoch.settings import Cache, Population, Size, as_cache
from stoker.epoch.setup import setup_without_plan
from stoker.epoch.stage import Decode, Samples, checked_targets, decoded_by
from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import ImageTransform
from stoker.mixing import MixedSource
from stoker.recipes.base import Recipe
from stoker.source.base import Source, as_source
from stoker.source.open import open_image_folder

Transform = Callable[[Any, np.random.Generator], Any]
"""Takes a decoded sample and a generator of random numbers of its own; returns the sample."""

Transforms = Transform | ImageTransform | Sequence[Transform | ImageTransform]
"""One or several in a row, of which the first may be of :mod:`stoker.images`."""


class FeedSamples(Samples):
    """The samples of ``source``, which is a Source, or the location of images in class folders.

    ``decode`` may be a dict of functions for a mixture of sources, one for each of its names, or
    ``"packed"``: samples are bytes, and batches :class:`~stoker.source.Packed`.

    Raises :class:`~stoker.errors.ConfigError` for targets of another length than the source, other
    names than those of the sources, and what opening the location does.
    """

    def __init__(
        self,
        source: Source | str | Path,
        decode: Decode | Mapping[str, Decode] | Literal["packed"] | None = None,
        targets: ArrayLike | None = None,
    ) -> None:
        own = None if isinstance(decode, Mapping) else decode
        each = decode if isinstance(decode, Mapping) else None
        self._decodes_images = own is None and isinstance(source, str | Path)
        if isinstance(source, str | Path):
            folder = open_image_folder(source)
            super().__init__(folder, own)
            targets = folder.targets if targets is None else targets
        else:
            super().__init__(as_source(source), own)
        if isinstance(self.source, MixedSource):
            self.mixture = self.source.mixture
        self._each = None if each is None else self._by_source(each)
        self.own_form = "rgb" if self._decodes_images else "bytes" if each is None else None
        self.targets = None if targets is None else checked_targets(targets, len(self))
        """``[N, ...]``, or None."""

    def decode(self, data: memoryview) -> Any:
        """Return the decoded sample, or the bytes where there is no decoder."""
        if self._decodes_images:
            from stoker.images import decode_image

            return decode_image(data)
        return super().decode(data)

    def image(self, data: memoryview) -> Any:
        """Return the bytes, or what ``decode`` makes of them."""
        return data if self._decode is None else self.decode(data)

    def decode_named(self, index: int, data: memoryview) -> Any:
        """Return what the function of the sample's source makes of its bytes."""
        if self._each is None:
            return super().decode_named(index, data)
        try:
            return decoded_by(self._each[self._origin(index)], bytes(data))
        except SampleCorrupt as error:
            raise self.named(index, error) from error

    def image_of(self, index: int, data: memoryview) -> Any:
        """Return the bytes, or what the function of the sample's source makes of them."""
        return self.image(data) if self._each is None else self.decode_named(index, data)

    def _by_source(self, each: Mapping[str, Decode]) -> tuple[Decode, ...]:
        """Return the functions in the order of the sources that are mixed."""
        names = () if self.mixture is None else self.mixture.names
        if set(each) != set(names):
            raise ConfigError(
                f"decode= has functions for {', '.join(each)}: give one for each source of a "
                f"mixture, which has {', '.join(names) or 'none'}"
            )
        return tuple(each[name] for name in names)

    def _origin(self, index: int) -> int:
        assert self.mixture is not None
        return int(self.mixture.origins(np.array(index)))

    def finish(self, index: int, decoded: Any) -> Any:
        """Return ``decoded``: the Feed transforms, with random numbers of the sample's own."""
        return decoded


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
