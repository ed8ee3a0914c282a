"""A source of samples that have a length and no contents."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from stoker.source.base import BaseSource, Packed, check_ids
from stoker.source.packed import Offsets, offsets_of, unpack


class BlankSource(BaseSource):
    """Samples of zeros, ``sizes`` (``i64[N]``) bytes long; keeps their lengths only. Thread-safe.

    Raises :class:`~stoker.errors.ConfigError` for ids out of range.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes = sizes.view()
        self._sizes.flags.writeable = False

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._sizes

    @property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        return hashlib.blake2b(np.ascontiguousarray(self._sizes).data, digest_size=16).hexdigest()

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return zeros for each of ``ids``."""
        data, offsets, _ = self.read_packed(ids)
        return unpack(data, offsets)

    def read_packed(self, ids: npt.ArrayLike) -> Packed:
        """Return zeros for all of ``ids`` in one array; there are never errors."""
        offsets = offsets_of(self._sizes[check_ids(ids, len(self))])
        return np.zeros(int(offsets[-1]), np.uint8), offsets, {}
