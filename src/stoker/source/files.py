"""A data set of files: one file, one sample."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker._core import Reader
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, PackedSource, check_ids, without
from stoker.source.listing import AnyPath, Listing, failure, list_paths
from stoker.source.listing_cache import ListingCache
from stoker.source.packed import Offsets, offsets_of


class FileSource(PackedSource):
    """Files given by a list of paths, read by a native pool of threads without the GIL.

    The listing is in shared memory: about 24 bytes and the name below the common directory per
    file, once per node for any number of workers. No file is held open.

    A file that was replaced by one of another size is reported when it is read. One that was
    rewritten in place with the same size is not noticed: data sets are assumed to be immutable.

    Thread-safe; works in children of every start method. A read of storage that hangs cannot be
    interrupted.
    """

    def __init__(
        self, paths: Iterable[AnyPath], *, threads: int = 16, drop_page_cache: bool = False
    ) -> None:
        """List the files: one ``stat`` each, ``threads`` at once.

        ``threads`` is also how many files each process reads at once, beside those that its
        calling threads read. ``drop_page_cache`` tells the kernel to forget what was read, for
        storage whose pages would only displace others.

        Raises :class:`ConfigError` for an empty list, something that is not a path or a number of
        threads out of range; :class:`SampleNotFound`, :class:`SampleCorrupt` or
        :class:`SourceUnavailable` for a file that is missing, not a file, or out of reach.
        """
        self._hold(list_paths(paths, check_threads(threads)), threads, drop_page_cache)

    def _hold(self, listing: Listing, threads: int, drop_page_cache: bool) -> None:
        """Keep the listing in shared memory."""
        self._root = listing.root
        self._names = SharedArray.copy_of(listing.names, "names")
        self._offsets = SharedArray.copy_of(listing.offsets, "offsets")
        self._sizes = SharedArray.copy_of(listing.sizes, "sizes")
        self._fingerprint = listing.fingerprint
        self._local_identity = listing.local_identity
        self._threads, self._drop_page_cache = threads, drop_page_cache
        self._reader: Reader | None = Reader(threads)
        self._stored: ListingCache | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None, "_closed": self._reader is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        closed = state.pop("_closed")
        vars(self).update(state)
        self._reader = None if closed else Reader(self._threads)

    def __len__(self) -> int:
        return len(self._sizes.array)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each file when it was listed, i64[N], read-only."""
        return self._sizes.read_only

    @property
    def fingerprint(self) -> str:
        """Hash of names, sizes and modification times; ``Listing`` says which."""
        return self._fingerprint

    @property
    def local_identity(self) -> str:
        """Hash of the files' change times; see :attr:`stoker.source.Source.local_identity`."""
        return self._local_identity

    def name(self, sample_id: int) -> str:
        """Return the file's path."""
        begin, end = self._offsets.array[sample_id : sample_id + 2]
        return os.fsdecode(self._root + self._names.array[begin:end].tobytes())

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the contents in one array; see :meth:`Source.read_packed`."""
        reader = self._reader
        if reader is None:
            raise ConfigError(f"this {type(self).__name__} is closed: make a new one to read from")
        wanted = check_ids(ids, len(self))
        offsets = offsets_of(self._sizes.array[wanted])
        data = np.empty(offsets[-1], np.uint8)
        status = np.empty(len(wanted), np.int32)
        reader.read(
            self._root,
            self._names.array,
            self._offsets.array,
            wanted,
            data,
            offsets,
            status,
            self._drop_page_cache,
        )
        return without(self._errors(wanted, status), data, offsets)

    def _errors(self, ids: npt.NDArray[np.uint32], status: npt.NDArray[np.int32]) -> Errors:
        """Return what went wrong, by position in ``ids``."""
        errors: Errors = {}
        for index in np.flatnonzero(status).tolist():
            sample = int(ids[index])
            error = failure(self.name(sample), int(status[index]), int(self._sizes.array[sample]))
            error.ids = [sample]
            errors[index] = error
            if isinstance(error, SampleNotFound | SampleCorrupt):
                self._discard_listing()
        return errors

    def _discard_listing(self) -> None:
        """Discard the stored listing, once: a new data set would use it."""
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.discard()

    def close(self) -> None:
        """Stop the threads of this process; further reads raise."""
        self._reader = None


def check_threads(threads: int) -> int:
    """Return ``threads``; raises ConfigError unless it is between 1 and 1024."""
    if not 1 <= threads <= 1024:
        raise ConfigError(f"threads={threads} is out of range: give 1 to 1024")
    return threads
