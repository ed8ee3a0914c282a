"""What a Feed makes of a source: bytes, decoded, transformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.stage import Decode, Samples, decoded_by
from stoker.errors import ConfigError, SampleCorrupt
from stoker.images import ImageTransform
from stoker.mixing import MixedSource
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
        each = decode if isinstance(decode, Mapping) else None
        self.is_packed = decode == "packed"
        if isinstance(decode, str) and not self.is_packed:
            raise ConfigError(f"decode={decode!r} is not known: give a function, or 'packed'")
        decode = None if isinstance(decode, Mapping | str) else decode
        is_folder = isinstance(source, str | Path)
        self._decodes_images = decode is None and is_folder and not self.is_packed
        if isinstance(source, str | Path):
            folder = open_image_folder(source)
            super().__init__(folder, decode)
            targets = folder.targets if targets is None else targets
        else:
            super().__init__(as_source(source), decode)
        if isinstance(self.source, MixedSource):
            self.mixture = self.source.mixture
        self._each = None if each is None else self._by_source(each)
        self.own_form = "rgb" if self._decodes_images else "bytes" if each is None else None
        self.targets = None if targets is None else _checked(targets, len(self))
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


def _checked(targets: ArrayLike, num_samples: int) -> NDArray[Any]:
    array = np.asarray(targets)
    if array.ndim == 0 or len(array) != num_samples:
        raise ConfigError(
            f"targets of shape {list(array.shape)} do not fit {num_samples} samples: give one each"
        )
    return array
