"""A data set of objects: one key, one sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, redacted
from stoker.shared import SharedArray
from stoker.source.base import PackedRead, PackedSource, check_ids, without
from stoker.source.keys import Keys
from stoker.source.listing_cache import ListingCache
from stoker.source.packed import Buffer, Offsets, offsets_of
from stoker.source.remote.backend import Why
from stoker.source.remote.client import Client
from stoker.source.remote.request import Failure, Tally, Wanted, error_of

_STALE = (Why.NOT_FOUND, None)  # the object is gone, or another one


class KeySource(PackedSource):
    """What sources of objects have in common; they differ in how the keys are found.

    The listing is in shared memory: about 32 bytes and the name below the prefix per object, once
    per node for any number of workers.

    The client of the storage lives in a helper process, one for each process that reads, started
    by exec at the first read: it survives forks of its parent, and costs the parent no time.
    Thread-safe; works in children of every start method, also after the parent has read.

    An object that was replaced since it was listed is reported as corrupt where the storage
    tells versions apart, or else when its size changed.
    """

    def _hold(
        self, client: Client, root: str, prefix: str, keys: Keys, stored: ListingCache | None
    ) -> None:
        """Keep ``keys``, the names below ``prefix``, in shared memory; they are ``stored`` too."""
        self._stored = stored
        self._client, self._root, self._prefix = client, root, prefix
        self._names = SharedArray.copy_of(keys.names, "names")
        self._offsets = SharedArray.copy_of(keys.offsets, "offsets")
        self._sizes = SharedArray.copy_of(keys.sizes, "sizes")
        self._tags = SharedArray.copy_of(keys.tags, "versions")
        self._fingerprint = keys.fingerprint
        self._closed = False

    def __len__(self) -> int:
        return len(self._sizes.array)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each object when it was listed, i64[N], read-only."""
        return self._sizes.read_only

    @property
    def fingerprint(self) -> str:
        """Hash of the names below the prefix, sizes and versions (ETag or time), in order."""
        return self._fingerprint

    @property
    def is_ready(self) -> bool:
        """Whether this process has its helper already."""
        return self._client.is_open

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far."""
        return self._client.tally

    def name(self, sample_id: int) -> str:
        """Return the object's address."""
        return redacted(self._root + self._key(sample_id))

    def _key(self, sample_id: int) -> str:
        begin, end = self._offsets.array[sample_id : sample_id + 2]
        return self._prefix + self._names.array[begin:end].tobytes().decode()

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the contents in one array; see :meth:`Source.read_packed`.

        Raises :class:`ConfigError` also when the credentials are rejected, after asking for new
        ones: that is not a matter of these samples.
        """
        self._check_open()
        wanted = check_ids(ids, len(self))
        sizes = self._sizes.array[wanted]
        data, failures = self._client.fetch(
            Wanted(
                keys=[self._key(sample) for sample in wanted.tolist()],
                starts=np.full(len(wanted), -1, np.int64),
                lengths=sizes,
                sizes=sizes,
                tags=self._tags.array[wanted],
            )
        )
        errors = {
            index: error_of(self.name(sample), failures[index], [sample])
            for index, sample in enumerate(wanted.tolist())
            if index in failures
        }
        if any(failure.why in _STALE for failure in failures.values()):
            self._discard_listing()
        return without(errors, data, offsets_of(sizes))

    @property
    def lanes(self) -> int:
        """As many as requests may be under way, if the storage's client is in this process."""
        return self._client.concurrency if self._client.is_here else 0

    def read_one(self, sample_id: int) -> Buffer:
        """Return one object as its client gives it; see :meth:`Source.read_one`."""
        if not self._client.is_here:
            return super().read_one(sample_id)
        self._check_open()
        sizes = self._sizes.array
        if not 0 <= sample_id < len(sizes):
            check_ids([sample_id], len(sizes))
        size = int(sizes[sample_id])
        if not size:
            return b""
        got = self._client.get(self._key(sample_id), size, int(self._tags.array[sample_id]))
        if isinstance(got, Failure):
            if got.why in _STALE:
                self._discard_listing()
            raise error_of(self.name(sample_id), got, [sample_id])
        return got

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} is closed: make a new one to read from")

    def _discard_listing(self) -> None:
        """Discard the stored listing, once: a new data set would use it."""
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.discard()

    def close(self) -> None:
        """End this process's helper; further reads raise."""
        self._closed = True
        self._client.close()
