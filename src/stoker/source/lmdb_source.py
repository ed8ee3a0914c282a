"""The values of an LMDB database."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids
from stoker.source.files import list_paths
from stoker.source.held import HeldSource, OwnHandle
from stoker.source.listing import Arrays, ListingCache, kept
from stoker.source.packed import Offsets, pack


class LMDBSource(HeldSource):
    """The values of a local LMDB database, in the order of their keys.

    Keys and sizes are read once, in one pass, and kept with the listings on local disk until the
    file changes; they take 16 bytes and the key for each sample, in shared memory. The database is
    opened without its lock file, so nothing may write to it meanwhile. It is mapped into memory: if
    the file is made shorter while it is read, the process ends. Thread-safe; works in children of
    every start method, also after the parent has read.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        skip: tuple[bytes, ...] = (b"__keys__", b"__len__", b"length"),
        cache_index: bool = True,
    ) -> None:
        """List the keys of the database at ``path``, a folder or a file.

        ``skip`` are keys that are no samples; by default those by which common recipes note what is
        in the database. ``cache_index=False`` neither uses nor keeps an index.

        Raises :class:`ConfigError` without lmdb, for a path that is none of a database, and no
        samples.
        """
        place = Path(path).absolute()
        data = place / "data.mdb" if place.is_dir() else place
        if not data.is_file():
            raise ConfigError(f"path={str(path)!r}: there is no LMDB database at {data}")
        listing = list_paths([data], 1)
        self._local_identity = listing.local_identity
        self._data = str(data)
        self._handle = OwnHandle(functools.partial(_open, self._data), _close)
        cache = None
        if cache_index:
            question = ("lmdb", self._data, listing.fingerprint, self._local_identity, skip)
            cache = ListingCache(repr(question))
        names, offsets, sizes = kept(cache, _three, lambda: self._listed(frozenset(skip)))
        if not len(sizes):
            raise ConfigError(f"{data} has no samples: a source needs at least one")
        self._names = SharedArray.copy_of(names, "names")
        self._offsets = SharedArray.copy_of(offsets, "offsets")
        self._sizes = SharedArray.copy_of(sizes, "sizes")
        self._fingerprint = f"{listing.fingerprint}-{skip}"

    def _listed(self, skip: frozenset[bytes]) -> Arrays:
        """Return the keys one after the other, where each begins, and the sizes of the values."""
        keys, sizes = [], []
        with self._handle.use() as shared, shared.database.begin(buffers=True) as view:
            for key, value in view.cursor():
                name = bytes(key)
                if name not in skip:
                    keys.append(name)
                    sizes.append(len(value))
        names, offsets = pack(keys)
        return {"names": names, "offsets": offsets, "sizes": np.array(sizes, np.int64)}

    def key(self, sample_id: int) -> bytes:
        """Return the key of a sample."""
        begin, end = self._offsets.array[sample_id : sample_id + 2]
        return self._names.array[begin:end].tobytes()

    def name(self, sample_id: int) -> str:
        """Return the path of the database and the sample's key."""
        return f"{self._data}#{self.key(sample_id).decode(errors='backslashreplace')}"

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the values in one array; see :meth:`Source.read_packed`."""
        wanted = check_ids(ids, len(self))
        samples: list[bytes] = []
        errors: Errors = {}
        with self._handle.use() as shared:
            try:
                with shared.database.begin() as view:
                    found = [view.get(self.key(sample)) for sample in wanted.tolist()]
            except _errors() as error:
                raise SourceUnavailable(f"{self._data}: {error}", wanted.tolist()) from error
        for row, (sample, value) in enumerate(zip(wanted.tolist(), found, strict=True)):
            if value is None:
                errors[row] = SampleNotFound(f"{self.name(sample)} is not there", [sample])
            elif len(value) != self._sizes.array[sample]:
                errors[row] = SampleCorrupt(f"{self.name(sample)} was replaced", [sample])
            samples.append(b"" if row in errors else value)
        return *pack(samples), errors

    def close(self) -> None:
        """Close the database in this process and refuse further reads."""
        self._handle.close()


def _three(arrays: Arrays) -> tuple[npt.NDArray[np.uint8], Offsets, Offsets]:
    return arrays["names"], arrays["offsets"], arrays["sizes"]


class _Shared:
    """A database that all sources of a process share: LMDB forbids to open it twice."""

    def __init__(self, data: str, lmdb: Any) -> None:
        self.database = lmdb.open(data, subdir=False, readonly=True, lock=False, readahead=False)
        self.process = os.getpid()


_shared: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _open(data: str) -> _Shared:
    """Return the open database; raises :class:`ConfigError`."""
    try:
        import lmdb
    except ImportError as error:
        raise ConfigError("lmdb is not installed: run pip install 'stoker[lmdb]'") from error
    with _opening:
        shared = _shared.get(data)
        if shared is None or shared.process != os.getpid():
            del shared  # so that the parent's is gone
            try:
                shared = _shared[data] = _Shared(data, lmdb)
            except lmdb.Error as error:
                raise ConfigError(f"{data} is no LMDB database: {error}") from error
    return shared


def _close(shared: _Shared) -> None:
    """Do nothing: it is closed with its last user."""


def _in_child() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _errors() -> type[Exception]:
    import lmdb

    kind: type[Exception] = lmdb.Error
    return kind
