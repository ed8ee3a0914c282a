"""Listings of image folders, kept on local disk while no directory changes."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from stoker.source.folder_listing import FolderListing, pack_identities
from stoker.source.listing import Listing
from stoker.source.listing_cache import Arrays, ListingCache
from stoker.types import FileIdentity

# Old file systems keep times in steps of up to 2 seconds: a directory that changed so shortly
# before it was listed may have changed again afterwards, with the same time.
_SETTLED_NS = 2_000_000_000
_LOOKED_AT = 64  # files
_FORM = "folder 2"  # of what is stored: other forms lie in other files


class FolderCache:
    """The stored listing of one folder; see :class:`ListingCache` for where and how.

    The listing is used again while every directory in it still is the one it was, unchanged, so
    files and folders that are added, removed or renamed are noticed, and so is another tree at the
    same path, whatever its times. A file that is rewritten in place changes no directory: 64 files
    drawn at random are looked at, so a tree that was rebuilt in place is noticed; a single file is
    when its size changed, by reading it, and else may not be. A file system that does not keep the
    times of directories (some mounts of object stores) hides what is added and removed: do not
    cache listings there. A source that reads a missing file, or one of another size, discards it.
    """

    def __init__(self, root: bytes, extensions: tuple[str, ...], allow_empty: bool) -> None:
        """Belong to the folder ``root``, listed with these extensions; nothing is read yet."""
        self._root = root
        question = (_FORM, os.path.realpath(root), extensions, allow_empty)
        self.stored = ListingCache(repr(question))
        """Where the listing lies."""

    def load(self, threads: int) -> FolderListing | None:
        """Return the stored listing if there is one and it still holds; ask ``threads`` at once."""

        def if_it_holds(stored: Arrays) -> FolderListing | None:
            listing = _decode(stored, self._root)
            return listing if _still_holds(listing, threads) else None

        return self.stored.load(if_it_holds)

    def store(self, listing: FolderListing) -> None:
        """Replace what is stored; a failure is logged."""
        self.stored.store(_encode(listing))


def _encode(listing: FolderListing) -> Arrays:
    return {
        "names": listing.files.names,
        "offsets": listing.files.offsets,
        "sizes": listing.files.sizes,
        "fingerprint": _join([listing.files.fingerprint.encode()]),
        "ctimes_ns": listing.files.ctimes_ns,
        "classes": _join([os.fsencode(name) for name in listing.classes]),
        "class_sizes": listing.class_sizes,
        "directories": _join(list(listing.directories)),
        "identities": listing.identities,
        "listed_ns": np.array(listing.listed_ns, np.int64),
    }


def _decode(parts: Arrays, root: bytes) -> FolderListing:
    return FolderListing(
        files=Listing(
            root=root,
            names=parts["names"],
            offsets=parts["offsets"],
            sizes=parts["sizes"],
            ctimes_ns=parts["ctimes_ns"],
            fingerprint=_split(parts["fingerprint"])[0].decode(),
        ),
        classes=tuple(map(os.fsdecode, _split(parts["classes"]))),
        class_sizes=parts["class_sizes"],
        directories=tuple(_split(parts["directories"])),
        identities=parts["identities"],
        listed_ns=int(parts["listed_ns"]),
    )


def _join(names: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return file names as one array; none of them can contain the NUL between them."""
    return np.frombuffer(b"\0".join(names), np.uint8)


def _split(joined: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _still_holds(listing: FolderListing, threads: int) -> bool:
    """Return whether no directory has changed since, as far as the kernel tells."""
    changed_ns = listing.identities[:, FileIdentity._fields.index("ctime_ns")]
    if int(changed_ns.max()) > listing.listed_ns - _SETTLED_NS:
        return False
    files = listing.files
    drawn = random.sample(range(len(files.sizes)), min(_LOOKED_AT, len(files.sizes)))
    paths = [files.root + name for name in listing.directories]
    paths += [files.root + files.name(place) for place in drawn]
    try:
        with ThreadPoolExecutor(threads, "stoker-list") as pool:
            now = list(pool.map(_identity, paths))
    except OSError:
        return False
    directories, looked_at = now[: len(listing.directories)], now[len(listing.directories) :]
    unchanged = np.array_equal([file.ctime_ns for file in looked_at], files.ctimes_ns[drawn])
    return unchanged and np.array_equal(pack_identities(directories), listing.identities)


def _identity(path: bytes) -> FileIdentity:
    return FileIdentity.of(os.stat(path))  # noqa: PTH116
