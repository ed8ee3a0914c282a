"""Listings of image folders, kept on local disk so that a million files are asked for once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from stoker.source.folder_listing import FolderListing
from stoker.source.listing import Listing

_log = logging.getLogger(__name__)
_MAGIC = b"stoker listing 1\n"
_DIGEST_BYTES = 32
# Old file systems keep times in steps of up to 2 seconds: a directory that changed so shortly
# before it was listed may have changed again afterwards, with the same time.
_SETTLED_NS = 2_000_000_000


class ListingCache:
    """The listing of one folder, in one file: written atomically, checked by hash when read.

    The listing is used again while every directory in it still has the modification time it
    had, so files and folders that are added, removed or renamed are noticed. A file that is
    rewritten in place changes no directory: if its size changed, reading it says so; if not, it
    goes unnoticed. So does any change on a file system that does not keep the modification times
    of directories (some mounts of object stores): do not cache listings there.

    Several processes may use one at once; the last to store wins. A file that is damaged or of
    another version is as good as none, and a directory that cannot be written is reported to the
    log and otherwise ignored.
    """

    def __init__(self, root: bytes, extensions: tuple[str, ...], allow_empty: bool) -> None:
        """Belong to the folder ``root``, listed with these extensions; nothing is read yet."""
        question = repr((os.path.realpath(root), extensions, allow_empty)).encode()
        name = hashlib.blake2b(question, digest_size=16).hexdigest()
        self.path = _cache_home() / "stoker" / "listings" / f"{name}.listing"

    def load(self, root: bytes, threads: int) -> FolderListing | None:
        """Return the stored listing if there is one and it still holds; ask ``threads`` at once."""
        try:
            stored = self.path.read_bytes()
        except OSError:
            return None
        try:
            listing = _decode(stored, root)
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            _log.warning("%s is damaged (%s): listing again", self.path, error)
            return None
        return listing if _still_holds(listing, threads) else None

    def store(self, listing: FolderListing) -> None:
        """Replace what is stored; a failure is logged."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.write(_encode(listing))
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(self.path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        temporary.unlink()
                    raise
        except OSError as error:
            _log.warning("cannot keep the listing in %s: %s", self.path, error)


def _cache_home() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    if configured.startswith("/"):
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user without a home: nothing is found there, nor can it be made
        return Path(os.devnull)


def _encode(listing: FolderListing) -> bytes:
    """Return the listing as magic, hash, and a zip of arrays."""
    body = io.BytesIO()
    np.savez(
        body,
        names=listing.files.names,
        offsets=listing.files.offsets,
        sizes=listing.files.sizes,
        fingerprint=_join([listing.files.fingerprint.encode()]),
        classes=_join([os.fsencode(name) for name in listing.classes]),
        class_sizes=listing.class_sizes,
        directories=_join(list(listing.directories)),
        mtimes_ns=listing.mtimes_ns,
        listed_ns=np.int64(listing.listed_ns),
    )
    payload = body.getbuffer()
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    return b"".join((_MAGIC, digest, payload))


def _decode(stored: bytes, root: bytes) -> FolderListing:
    """Return the listing; raises ValueError, KeyError or BadZipFile when it is not one."""
    start = len(_MAGIC) + _DIGEST_BYTES
    payload = memoryview(stored)[start:]
    if not stored.startswith(_MAGIC):
        raise ValueError("another version")
    if hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest() != stored[len(_MAGIC) : start]:
        raise ValueError("its hash is wrong")
    with np.load(io.BytesIO(payload), allow_pickle=False) as parts:
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
