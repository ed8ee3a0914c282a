"""Finds the keys of a data set: under a prefix or from a list, kept on local disk."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from stoker.errors import ConfigError, SourceError
from stoker.source.keys import Keys, pack_entries
from stoker.source.listing_cache import Arrays, ListingCache
from stoker.source.remote.address import Address
from stoker.source.remote.backend import Entry
from stoker.source.remote.client import Client
from stoker.source.remote.request import Failure, error_of

DAY = 86400.0
_T = TypeVar("_T")
_HEADS = 16  # objects of a stored list of keys that are asked after
_TAIL = 500  # keys at the end of a stored listing that are compared; half a page


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
        for place in (-1, random.randrange(len(keys)), last):
            after = keys[place].decode() if place >= 0 else ""
            page = self._client.page(prefix, after)
            if isinstance(page, Failure):
                return False
            if by_folder:
                below = len(prefix.encode())
                page = [entry for entry in page if entry.key.find(b"/", below) >= 0]
            if not _agrees(keys, place + 1, page, to_end=place == last):
                return False
        return True

    def _heads_hold(self, stored: Keys, keys: Sequence[str]) -> bool:
        places = random.sample(range(len(keys)), min(_HEADS, len(keys)))
        try:
            found = self._heads([keys[place] for place in places])
        except (SourceError, ConfigError):
            return False
        kept = stored.take(places)
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
