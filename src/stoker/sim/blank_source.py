"""A source of samples that have lengths and no bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from stoker.source.base import BaseSource, PackedRead, check_ids
from stoker.source.packed import Offsets, unpack


class BlankSource(BaseSource):
    """Samples ``sizes`` (``i64[N]``) bytes long, and empty when they are read. Thread-safe.

    For an :class:`~stoker.sim.accounting.AccountingArena`, which knows how long they are.

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
    def sizes_are_exact(self) -> bool:
        """Whether samples are as long as they are said to be: none of these is."""
        return False

    @property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        return hashlib.blake2b(np.ascontiguousarray(self._sizes).data, digest_size=16).hexdigest()

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return nothing for each of ``ids``."""
        data, offsets, _ = self.read_packed(ids)
        return unpack(data, offsets)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return samples of no bytes; there are never errors."""
        count = len(check_ids(ids, len(self)))
        return np.empty(0, np.uint8), np.zeros(count + 1, np.int64), {}
