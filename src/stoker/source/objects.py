"""Data sets of objects: in S3, Google Cloud Storage, Azure, behind HTTP, or what fsspec reads."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SourceError, redacted
from stoker.shared import SharedArray
from stoker.source.base import Multiplexer, PackedRead, Room, check_ids, without
from stoker.source.held import HeldSource
from stoker.source.listing import Arrays, Keys, ListingCache, pack_entries
from stoker.source.pace import Pace
from stoker.source.packed import Buffer, offsets_of
from stoker.source.remote.backend import Address, Entry, Why, address_of
from stoker.source.remote.client import Client
from stoker.source.remote.downloads import Downloads, Request
from stoker.source.remote.request import Failure, Tally, Wanted, error_of

DAY = 86400.0
_T = TypeVar("_T")
_STALE = (Why.NOT_FOUND, None)  # the object is gone, or another one
_HEADS = 16  # objects of a stored list of keys that are asked after
_TAIL = 500  # keys at the end of a stored listing that are compared; half a page


class KeySource(HeldSource):
    """What sources of objects have in common; they differ in how the keys are found.

    The listing is in shared memory: about 32 bytes and the name below the prefix per object, once
    per node for any number of workers.

    The client of the storage lives in a helper process, one for each process that reads, started
    by exec at the first read: it survives forks of its parent, and costs the parent no time. Whole
    objects of web servers are first asked for in this process; if they come, none is started.
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

    @property
    def is_ready(self) -> bool:
        """Whether it reads with no helper to start: workers would wait for a prefetch process."""
        return self._client.starts_nothing

    @property
    def tally(self) -> Tally:
        """The requests that this process has made so far."""
        return self._client.tally

    def name(self, sample_id: int) -> str:
        """Return the object's address."""
        return redacted(self._root + self._key(sample_id))

    def _key(self, sample_id: int) -> str:
        return self._keys(np.array([sample_id]))[0]

    def _keys(self, ids: npt.NDArray[np.integer]) -> list[str]:
        names, offsets = self._names.array.data, self._offsets.array
        bounds = zip(offsets[ids].tolist(), offsets[ids + 1].tolist(), strict=True)
        return [self._prefix + str(names[begin:end], "utf-8") for begin, end in bounds]

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
                keys=self._keys(wanted.astype(np.int64)),
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

    def multiplexer(self) -> Multiplexer | None:
        """Return what reads through libcurl, where that gets what the storage's client gets."""
        self._check_open()
        downloads = self._client.downloads()
        return None if downloads is None else _ManyObjects(downloads, self._requests)

    def _requests(
        self, pieces: Sequence[tuple[int, Any]], rooms: Sequence[Room | None]
    ) -> list[Request]:
        ids = np.array([sample for sample, _ in pieces], np.int64)
        sizes, tags = self._sizes.array[ids].tolist(), self._tags.array[ids].tolist()
        tickets = [ticket for _, ticket in pieces]
        return [*map(Request, self._keys(ids), sizes, tags, tickets, rooms)]

    def close(self) -> None:
        """End this process's helper; further reads raise."""
        super().close()
        self._client.close()


class _ManyObjects:
    """Reads objects in one thread; see :class:`stoker.source.base.Multiplexer`."""

    def __init__(self, downloads: Downloads, requests: Callable[..., list[Request]]) -> None:
        self._downloads, self._requests = downloads, requests
        self.wait, self.wake, self.close = downloads.wait, downloads.wake, downloads.close

    def start(self, pieces: Sequence[tuple[int, Any]], rooms: Sequence[Room | None]) -> None:
        """Begin to read samples."""
        self._downloads.start(self._requests(pieces, rooms))


class KeyListing:
    """Lists keys, or takes them from the disk of this machine.

    A stored listing is used again if it is at most ``max_age`` seconds old and a cheap check
    finds no difference: of a prefix, the first page of a listing, the page after a key drawn at
    random, and the last 500 keys with what comes after them (three requests); of a list of keys,
    16 of them drawn at random. So additions and removals at the ends are noticed at once,
    elsewhere by chance or after ``max_age``. An object that was replaced or removed unnoticed is
    reported when it is read, and its source discards the listing; one that was added unnoticed is
    missing until then.

    Listings are stored only where a page costs one request wherever it begins (S3 and Google
    Cloud Storage), and for lists of keys.
    """

    def __init__(self, client: Client, address: Address, max_age: float) -> None:
        """List through ``client``; ``max_age`` of 0 neither uses nor stores listings."""
        if not max_age >= 0:
            raise ConfigError(f"listing_max_age={max_age} is not possible: give seconds, 0 or more")
        self._client, self._address, self._max_age = client, address, max_age
        self.stored: ListingCache | None = None
        """Where the latest listing is stored, so that it can be discarded; None: nowhere."""

    def below(self, prefix: str, *, by_folder: bool = False) -> Keys:
        """Return the objects whose keys begin with ``prefix``, sorted; names are full keys.

        ``by_folder`` takes only those in folders directly below it, which are listed at once.
        Raises :class:`ConfigError` when there are none or listing is not permitted,
        :class:`SourceUnavailable` when the storage does not answer.
        """
        cache = self._cache("below", prefix, by_folder) if self._address.lists_in_order else None
        self.stored = cache
        stored = self._load(cache)
        if stored is not None and self._prefix_holds(stored, prefix, by_folder):
            return stored
        listed = (self._client.list_folders if by_folder else self._client.list_all)(prefix)
        name = self._address.root + prefix
        keys = _unless_failed(name, listed)
        if not len(keys):
            raise ConfigError(f"there are no objects below {name}: check the address")
        self._store(cache, keys)
        return keys

    def of(self, keys: Sequence[str]) -> Keys:
        """Return what the storage says of these keys, in this order.

        One request each, many at once. Raises :class:`SampleNotFound` for one that is not there,
        else as :meth:`below`.
        """
        cache = self.stored = self._cache("of", *keys)
        stored = self._load(cache)
        if stored is not None and self._heads_hold(stored, keys):
            return stored
        found = self._heads(keys)
        self._store(cache, found)
        return found

    def _heads(self, keys: Sequence[str]) -> Keys:
        entries = []
        for index, answer in enumerate(self._client.head(list(keys))):
            entries.append(_unless_failed(self._address.root + keys[index], answer, index))
        # The keys are those that were asked for, whatever the storage makes of them.
        named = [entry._replace(key=key.encode()) for entry, key in zip(entries, keys, strict=True)]
        return pack_entries(named)

    def _cache(self, *question: object) -> ListingCache | None:
        if self._max_age == 0:
            return None
        return ListingCache(repr(("keys", self._address.question, *question)))

    def _load(self, cache: ListingCache | None) -> Keys | None:
        def if_it_is_young(stored: Arrays) -> Keys | None:
            age = time.time() - float(stored["listed_at"])
            if not 0 <= age <= self._max_age:
                return None
            return Keys(stored["names"], stored["offsets"], stored["sizes"], stored["tags"])

        return None if cache is None else cache.load(if_it_is_young)

    def _store(self, cache: ListingCache | None, keys: Keys) -> None:
        if cache is None:
            return
        parts: Arrays = {
            "names": keys.names,
            "offsets": keys.offsets,
            "sizes": keys.sizes,
            "tags": keys.tags,
            "listed_at": np.array(time.time()),
        }
        cache.store(parts)

    def _prefix_holds(self, keys: Keys, prefix: str, by_folder: bool) -> bool:
        """Return whether three pages of a new listing agree with the stored one."""
        last = max(-1, len(keys) - _TAIL - 1)
        for at in (-1, random.randrange(len(keys)), last):
            after = keys[at].decode() if at >= 0 else ""
            page = self._client.page(prefix, after)
            if isinstance(page, Failure):
                return False
            if by_folder:
                below = len(prefix.encode())
                page = [entry for entry in page if entry.key.find(b"/", below) >= 0]
            if not _agrees(keys, at + 1, page, to_end=at == last):
                return False
        return True

    def _heads_hold(self, stored: Keys, keys: Sequence[str]) -> bool:
        drawn = random.sample(range(len(keys)), min(_HEADS, len(keys)))
        try:
            found = self._heads([keys[at] for at in drawn])
        except (SourceError, ConfigError):
            return False
        kept = stored.take(drawn)
        return np.array_equal(found.sizes, kept.sizes) and np.array_equal(found.tags, kept.tags)


def _agrees(keys: Keys, begin: int, page: list[Entry], to_end: bool) -> bool:
    """Return whether ``page`` is what comes from ``begin`` on, or is all of that (``to_end``)."""
    end = len(keys)
    if page and not to_end:
        end = bisect_right(keys, page[-1].key, lo=begin)
    # Empty objects are left out on both sides: some are markers, which no listing keeps.
    stored = [Entry(keys[i], int(keys.sizes[i]), int(keys.tags[i])) for i in range(begin, end)]
    return [e for e in stored if e.size] == [e for e in page if e.size]


def _unless_failed(name: str, answer: _T | Failure, index: int | None = None) -> _T:
    """Return the answer, or raise it if it is an error."""
    if isinstance(answer, Failure):
        raise error_of(name, answer, [] if index is None else [index])
    return answer


class ObjectSource(KeySource):
    """The objects under a prefix, or those of a list of keys, read through obstore.

    Addresses are ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
    ``http(s)://host/path`` and ``file:///folder``. A prefix is a folder: ``s3://b/train`` stands
    for the objects below ``train/``. Samples are in the order of the bytes of their keys; empty
    objects that only mark a folder are left out. Web servers do not list: there ``keys`` are
    needed.

    :class:`KeySource` says how it reads, :class:`KeyListing` when a stored listing is used again.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
        listing_max_age: float = DAY,
    ) -> None:
        """List the objects below ``url``, or look up those of ``keys``, which are below it.

        ``storage_options`` go to obstore: what its store of that kind knows (``endpoint``,
        ``region``, ``virtual_hosted_style_request``, ``credential_provider``, ...), options of
        its HTTP client (``allow_http``, ``read_timeout``, ...; also as ``client_options``), and
        ``retry_config``, whose retries come below those of ``pace``; by default it has none.
        Without credentials there, obstore looks where its store usually does (environment,
        instance metadata; not in configuration files). ``credential_provider`` is a provider
        that pickles, or a class like ``obstore.auth.boto3.Boto3CredentialProvider``, of which
        each helper process makes its own.
        ``listing_max_age`` is in seconds; 0 lists again each time.

        Raises :class:`ConfigError` for a bad address or option, rejected credentials, no objects,
        or without obstore; :class:`SampleNotFound` for a key that is not there;
        :class:`SourceUnavailable` when the storage does not answer.
        """
        address = address_of(url, storage_options)
        self._find(address, keys, pace or Pace(), listing_max_age)

    def _find(
        self,
        address: Address,
        keys: Sequence[str] | None,
        pace: Pace,
        listing_max_age: float,
        in_process: bool = False,
    ) -> None:
        """List and hold."""
        prefix = address.prefix.rstrip("/") + "/" if address.prefix.strip("/") else address.prefix
        client = Client(address.location, pace, in_process)
        listing = KeyListing(client, address, listing_max_age)
        if keys is None:
            found = listing.below(prefix)
        else:
            found = listing.of([prefix + key for key in check_keys(keys)])
        names = found.without_prefix(len(prefix.encode()))
        self._hold(client, address.root, prefix, names, listing.stored)


def check_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return ``keys``; raises ConfigError when it is one key, or none, or not of text."""
    if isinstance(keys, str | bytes):
        raise ConfigError(f"keys={keys!r} is one key: give a list of keys")
    if not len(keys):
        raise ConfigError("keys is empty: a source needs at least one object")
    for key in keys:
        if not isinstance(key, str) or not key:
            raise ConfigError(f"keys has {key!r}: keys are texts that are not empty")
    return keys


class FsspecSource(ObjectSource):
    """The files below a folder of any file system of fsspec, or those of a list of paths.

    For what :class:`ObjectSource` does not read. fsspec does not say which version of a file it
    reads, so one that was replaced is noticed only by its size. Listings are not stored, because
    fsspec cannot list in pages.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """List the files below ``url``, or look up those of ``keys``, which are below it.

        ``storage_options`` go to the file system. ``memory://`` is read in this process, and so
        in children only after a fork; everything else in the helper process.

        Raises as :class:`ObjectSource` does.
        """
        address = address_of(url, storage_options, by_fsspec=True)
        in_memory = url.partition("://")[0].lower() == "memory"
        self._find(address, keys, pace or Pace(), 0.0, in_process=in_memory)
