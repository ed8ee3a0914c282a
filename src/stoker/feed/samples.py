"""What a Feed makes of a source: bytes, decoded, transformed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.epoch.stage import Decode, Samples
from stoker.errors import ConfigError
from stoker.images import ImageTransform
from stoker.source.base import Source, as_source
from stoker.source.open import open_image_folder

Transform = Callable[[Any, np.random.Generator], Any]
"""Takes a decoded sample and a generator of random numbers of its own; returns the sample."""

Transforms = Transform | ImageTransform | Sequence[Transform | ImageTransform]
"""One or several in a row, of which the first may be of :mod:`stoker.images`."""


class FeedSamples(Samples):
    """The samples of ``source``, which is a Source, or the location of images in class folders.

    Raises :class:`~stoker.errors.ConfigError` for targets of another length than the source, and
    what opening the location does.
    """

    def __init__(
        self,
        source: Source | str | Path,
        decode: Decode | None = None,
        targets: ArrayLike | None = None,
    ) -> None:
        self._decodes_images = decode is None and isinstance(source, str | Path)
        if isinstance(source, str | Path):
            folder = open_image_folder(source)
            super().__init__(folder, decode)
            targets = folder.targets if targets is None else targets
        else:
            super().__init__(as_source(source), decode)
        self.own_form = "rgb" if self._decodes_images else "bytes"
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
