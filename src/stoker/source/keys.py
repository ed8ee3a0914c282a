"""The objects of a data set, packed into a few arrays: no Python object per key is kept."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stoker.source.packed import Bytes, Offsets, offsets_of
from stoker.source.remote.backend import Entry

Tags = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Keys:
    """Names, sizes and versions of N objects."""

    names: Bytes
    """The names one after the other, in UTF-8, u8[total]."""
    offsets: Offsets
    """Where each name begins in ``names``, and where the last ends, i64[N + 1]."""
    sizes: Offsets
    """Bytes of each object, i64[N]."""
    tags: Tags
    """The version of each object, u64[N]; 0 where the storage does not say."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        """Return one name."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.names[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @property
    def fingerprint(self) -> str:
        """Hash of names, sizes and versions, in order."""
        digest = hashlib.blake2b(digest_size=16, person=b"stoker.objects")
        for part in (self.offsets, self.names, self.sizes, self.tags):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def take(self, order: npt.ArrayLike) -> Keys:
        """Return the keys with these indices, i64[n], in this order."""
        chosen = np.asarray(order, np.int64)
        lengths = np.diff(self.offsets)[chosen]
        offsets = offsets_of(lengths)
        # The bytes of name i of the result are consecutive, as they were before.
        shift = np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        names = self.names[shift + np.arange(offsets[-1])]
        return Keys(names, offsets, self.sizes[chosen], self.tags[chosen])

    def without_prefix(self, length: int) -> Keys:
        """Return the keys without the first ``length`` bytes of each name."""
        kept = np.ones(len(self.names), np.bool_)
        for at in range(length):
            kept[self.offsets[:-1] + at] = False
        lengths = np.diff(self.offsets) - length
        return Keys(self.names[kept], offsets_of(lengths), self.sizes, self.tags)


class KeyTable:
    """Gathers pages of entries into :class:`Keys`. One thread."""

    def __init__(self) -> None:
        self._pages: list[Keys] = []
        self._last = b""
        self.is_sorted = True
        """Whether all pages so far came in the order of the keys."""

    @property
    def last(self) -> bytes:
        """The last key that was added; empty before the first."""
        return self._last

    def add(self, page: Sequence[Entry]) -> None:
        """Add a page."""
        if not page:
            return
        names = [entry.key for entry in page]
        in_order = all(a < b for a, b in pairwise([self._last, *names]))
        self.is_sorted = self.is_sorted and in_order
        self._last = names[-1]
        self._pages.append(pack_entries(page))

    def finish(self) -> Keys:
        """Return all entries, sorted by the bytes of their names, each once.

        Markers of folders (empty objects that others lie below, which some tools create) are
        left out.
        """
        keys = concatenate(self._pages)
        return without_markers(keys if self.is_sorted else sort(keys))


def pack_entries(entries: Sequence[Entry]) -> Keys:
    """Return the entries as arrays, in their order."""
    count = len(entries)
    return Keys(
        np.frombuffer(b"".join([entry.key for entry in entries]), np.uint8),
        offsets_of(np.fromiter((len(entry.key) for entry in entries), np.int64, count)),
        np.fromiter((entry.size for entry in entries), np.int64, count),
        np.fromiter((entry.tag for entry in entries), np.uint64, count),
    )


def concatenate(parts: Sequence[Keys]) -> Keys:
    """Return all keys, one part after the other."""
    if not parts:
        return pack_entries([])
    return Keys(
        np.concatenate([part.names for part in parts]),
        offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.tags for part in parts]),
    )


def sort(keys: Keys) -> Keys:
    """Return the keys sorted by the bytes of their names, each once."""
    names = [keys[index] for index in range(len(keys))]
    order = sorted(range(len(names)), key=names.__getitem__)
    first = [n == 0 or names[i] != names[order[n - 1]] for n, i in enumerate(order)]
    return keys.take(np.array(order, np.int64)[first])


def without_markers(keys: Keys) -> Keys:
    """Return the sorted keys without markers of folders."""
    empty = np.flatnonzero(keys.sizes == 0).tolist()
    markers = [index for index in empty if _is_above_another(keys, index)]
    return keys.take(np.delete(np.arange(len(keys)), markers)) if markers else keys


def _is_above_another(keys: Keys, index: int) -> bool:
    """Return whether the sorted keys contain one below ``keys[index]`` taken as a folder."""
    folder = keys[index].rstrip(b"/") + b"/"
    at = bisect_left(keys, folder, lo=index + 1)
    return at < len(keys) and keys[at].startswith(folder)
