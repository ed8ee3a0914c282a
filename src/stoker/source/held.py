"""What a source holds in every process: arrays in shared memory, and what a library has open."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError
from stoker.shared import SharedArray
from stoker.source.base import PackedRead, PackedSource, check_ids
from stoker.source.listing import ListingCache
from stoker.source.packed import Bytes, Offsets, offsets_of, pack

_T = TypeVar("_T")


class HeldSource(PackedSource):
    """A source that keeps the sizes of its samples in shared memory.

    A subclass sets these, and defines ``read_packed``, which begins with :meth:`_check_open`.
    """

    _sizes: SharedArray
    _fingerprint: str
    _local_identity = ""
    _stored: ListingCache | None = None
    """Where the listing is kept that it was made from."""
    _closed = False

    def __len__(self) -> int:
        return len(self._sizes.array)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only; see :attr:`sizes_are_exact`."""
        return self._sizes.read_only

    @property
    def fingerprint(self) -> str:
        """Hash of the names, sizes and versions (or times) of what is read, and of how it is."""
        return self._fingerprint

    @property
    def local_identity(self) -> str:
        """Hash of the files' change times where they are of this machine, else empty."""
        return self._local_identity

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed: make a new one to read from")

    def _discard_listing(self) -> None:
        """Discard the stored listing, once: a new data set would use it."""
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.discard()

    def close(self) -> None:
        """Refuse further reads; memory is freed with the object."""
        self._closed = True


class MemorySource(HeldSource):
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

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array; there are never errors."""
        self._check_open()
        wanted = check_ids(ids, len(self))
        starts = self._offsets.array[wanted]
        sizes = self._sizes.array[wanted]
        offsets = offsets_of(sizes)
        data = np.empty(offsets[-1], np.uint8)
        for start, size, at in zip(starts.tolist(), sizes.tolist(), offsets.tolist(), strict=False):
            data[at : at + size] = self._data.array[start : start + size]
        return data, offsets, {}


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


class OwnHandle(Generic[_T]):
    """What a library has open that does not survive a fork: once in each process.

    Opens when it is first used in a process; a forked child opens its own.

    The child lets go of what its parent had open, which must be for reading only. Pickles without
    it. Threads take turns.
    """

    def __init__(self, make: Callable[[], _T], shut: Callable[[_T], Any]) -> None:
        """``make`` opens, ``shut`` closes; both pickle."""
        self._make, self._shut = make, shut
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._turn = threading.Lock()
        self._opened: _T | None = None
        _handles.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_shut": self._shut, "_closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @contextmanager
    def use(self) -> Iterator[_T]:
        """Give what is open, to one thread at a time; raises :class:`ConfigError` once closed."""
        with self._turn:
            if self._closed:
                raise ConfigError("this source is closed: make a new one to read from")
            if self._opened is None:
                self._opened = self._make()
            yield self._opened

    def close(self) -> None:
        """Close what this process has open, for good; may be called again."""
        with self._turn:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            self._shut(opened)

    def leave(self) -> None:
        """Let go of what the parent had open."""
        self._turn, self._opened = threading.Lock(), None


_handles: weakref.WeakSet[OwnHandle[Any]] = weakref.WeakSet()


def _in_child() -> None:
    for handle in list(_handles):
        handle.leave()


os.register_at_fork(after_in_child=_in_child)
