"""What a recipe says about packaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

_LARGEST = 1 << 28
_PACKAGES = 20  # that a cache has room for, if packages suit it


@dataclass(frozen=True)
class Packaging:
    """Samples of low importance come in packages, each one read (iCache, HPCA'23).

    Raises :class:`~stoker.errors.ConfigError` for a size out of range.
    """

    min_bytes: int = 1 << 20
    """Bytes of samples in a package at least; fewer only where all of low importance have less."""
    url: str | None = None
    """Where packages are kept: a directory for nothing else, or a prefix of an object store, like
    ``s3://bucket/packages``. They stay there, and a job that is started again finds them; one job
    at a time uses the place. None: a temporary directory, which goes with the job."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Options of the object store, as for :class:`~stoker.source.ObjectSource`; may hold secrets,
    and so is not shown."""

    shrinks: bool = False
    """Whether packages are smaller in a small cache: a twentieth of it at most."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= _LARGEST:
            raise ConfigError(f"min_bytes={self.min_bytes} is refused: give 1 to {_LARGEST} bytes")

    @classmethod
    def of(cls, min_bytes: int | None, url: str | None = None) -> Packaging:
        """Return packages of ``min_bytes``; None: of the usual size, which shrinks."""
        return cls(url=url, shrinks=True) if min_bytes is None else cls(min_bytes, url)

    def fitted(self, capacity: int) -> Packaging:
        """Return these settings for a cache of ``capacity`` bytes; the same unless they shrink."""
        if not self.shrinks:
            return self
        return replace(self, min_bytes=min(self.min_bytes, max(1, capacity // _PACKAGES)))

    def least_region_bytes(self, sizes: NDArray[np.int64]) -> int:
        """Return the bytes that the cache of low importance needs to hold any package.

        ``sizes`` (``i64[N]``) are those of all samples.
        """
        return int(min(self.min_bytes + sizes.max() - 1, sizes.sum()))
