"""Listings of image folders, kept on local disk while no directory changes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from stoker.source.folder_listing import FolderListing
from stoker.source.listing import Listing
from stoker.source.listing_cache import Arrays, ListingCache

# Old file systems keep times in steps of up to 2 seconds: a directory that changed so shortly
# before it was listed may have changed again afterwards, with the same time.
_SETTLED_NS = 2_000_000_000


class FolderCache:
    """The stored listing of one folder; see :class:`ListingCache` for where and how.

    The listing is used again while every directory in it still has the modification time it
    had, so files and folders that are added, removed or renamed are noticed. A file that is
    rewritten in place changes no directory: if its size changed, reading it says so; if not, it
    goes unnoticed. So does any change on a file system that does not keep the modification times
    of directories (some mounts of object stores): do not cache listings there.
    """

    def __init__(self, root: bytes, extensions: tuple[str, ...], allow_empty: bool) -> None:
        """Belong to the folder ``root``, listed with these extensions; nothing is read yet."""
        self._root = root
        self._cache = ListingCache(repr((os.path.realpath(root), extensions, allow_empty)))

    def load(self, threads: int) -> FolderListing | None:
        """Return the stored listing if there is one and it still holds; ask ``threads`` at once."""
        stored = self._cache.load()
        if stored is None:
            return None
        listing = _decode(stored, self._root)
        return listing if _still_holds(listing, threads) else None

    def store(self, listing: FolderListing) -> None:
        """Replace what is stored; a failure is logged."""
        self._cache.store(_encode(listing))


def _encode(listing: FolderListing) -> Arrays:
    return {
        "names": listing.files.names,
        "offsets": listing.files.offsets,
        "sizes": listing.files.sizes,
        "fingerprint": _join([listing.files.fingerprint.encode()]),
        "classes": _join([os.fsencode(name) for name in listing.classes]),
        "class_sizes": listing.class_sizes,
        "directories": _join(list(listing.directories)),
        "mtimes_ns": listing.mtimes_ns,
        "listed_ns": np.array(listing.listed_ns, np.int64),
    }


def _decode(parts: Arrays, root: bytes) -> FolderListing:
    return FolderListing(
        files=Listing(
            root=root,
            names=parts["names"],
            offsets=parts["offsets"],
            sizes=parts["sizes"],
            fingerprint=_split(parts["fingerprint"])[0].decode(),
        ),
        classes=tuple(map(os.fsdecode, _split(parts["classes"]))),
        class_sizes=parts["class_sizes"],
        directories=tuple(_split(parts["directories"])),
        mtimes_ns=parts["mtimes_ns"],
        listed_ns=int(parts["listed_ns"]),
    )


def _join(names: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return file names as one array; none of them can contain the NUL between them."""
    return np.frombuffer(b"\0".join(names), np.uint8)


def _split(joined: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _still_holds(listing: FolderListing, threads: int) -> bool:
    """Return whether no directory has changed since, as far as its modification time tells."""
    if int(listing.mtimes_ns.max()) > listing.listed_ns - _SETTLED_NS:
        return False
    paths = (listing.files.root + name for name in listing.directories)
    with ThreadPoolExecutor(threads, "stoker-list") as pool:
        now = list(pool.map(_mtime_ns, paths))
    return np.array_equal(now, listing.mtimes_ns)


def _mtime_ns(path: bytes) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return -1
