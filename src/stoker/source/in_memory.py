"""A data set whose encoded samples are all in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.base import BaseSource, PackedRead, check_ids
from stoker.source.packed import Bytes, Offsets, offsets_of, pack, unpack


class MemorySource(BaseSource):
    """Samples held in shared memory: workers of any start method see them without a copy.

    Useful for small data sets, for tests, and under a slow wrapper in benchmarks. Thread-safe.
    """

    def __init__(self, samples: Sequence[bytes] | tuple[npt.ArrayLike, npt.ArrayLike]) -> None:
        """Copy ``samples`` into shared memory and hash them.

        ``samples`` is a sequence of bytes-like objects, or a tuple ``(data u8[total],
        offsets i64[n + 1])`` of arrays. Raises :class:`ConfigError` when there are none, or when
        the offsets do not fit the data.
        """
        if isinstance(samples, tuple) and any(isinstance(part, np.ndarray) for part in samples):
            data, offsets = _checked(*samples)
        else:
            data, offsets = pack(cast(Sequence[bytes], samples))
        if len(offsets) < 2:
            raise ConfigError("samples is empty: a source needs at least one sample")
        self._data = SharedArray.copy_of(data, "samples")
        self._offsets = SharedArray.copy_of(offsets, "offsets")
        self._sizes = SharedArray.copy_of(np.diff(offsets), "sizes")
        digest = hashlib.blake2b(digest_size=16, person=b"stoker.memory")
        digest.update(offsets.data)
        digest.update(data.data)
        self._fingerprint = digest.hexdigest()
        self._closed = False

    def __len__(self) -> int:
        return len(self._sizes.array)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._sizes.read_only

    @property
    def fingerprint(self) -> str:
        """Hash of all samples' bytes and lengths, in order."""
        return self._fingerprint

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples of ``ids``; raises ConfigError for a bad id or when closed."""
        data, offsets, _ = self.read_packed(ids)
        return unpack(data, offsets)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; there are never errors."""
        if self._closed:
            raise ConfigError("this MemorySource is closed: make a new one to read from")
        wanted = check_ids(ids, len(self))
        starts = self._offsets.array[wanted]
        sizes = self._sizes.array[wanted]
        offsets = offsets_of(sizes)
        data = np.empty(offsets[-1], np.uint8)
        for start, size, at in zip(starts.tolist(), sizes.tolist(), offsets.tolist(), strict=False):
            data[at : at + size] = self._data.array[start : start + size]
        return data, offsets, {}

    def close(self) -> None:
        """Make further reads raise; the memory is freed with the object."""
        self._closed = True


def _checked(data: npt.ArrayLike, offsets: npt.ArrayLike) -> tuple[Bytes, Offsets]:
    """Return the packed samples as flat arrays; raises ConfigError when they do not fit."""
    flat = np.ascontiguousarray(data, np.uint8).reshape(-1)
    bounds = np.ascontiguousarray(offsets, np.int64)
    if bounds.ndim != 1 or len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(flat):
        raise ConfigError(
            f"offsets must be i64[n + 1] from 0 to the {len(flat)} bytes of data, "
            f"and has shape {bounds.shape}, first {bounds[:1]}, last {bounds[-1:]}"
        )
    if (np.diff(bounds) < 0).any():
        raise ConfigError("offsets must not decrease: sample i is data[offsets[i]:offsets[i + 1]]")
    return flat, bounds
