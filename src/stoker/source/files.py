"""A data set of files: one file, one sample; its listing is packed into a few arrays."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker._core import Reader
from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, check_ids, without
from stoker.source.held import HeldSource
from stoker.source.packed import Bytes, Offsets, offsets_of

_SLOW_TO_OPEN, _TOO_SLOW = 2e-4, 1e-3  # seconds
_LIST_AGAIN = "make the data set again, which lists it again"
AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@dataclass(frozen=True, eq=False)
class Listing:
    """Paths and sizes of N files.

    ``fingerprint`` hashes the names below ``root``, in order, with every file's size and
    modification time in nanoseconds. Nodes that mount the same storage agree on it wherever they
    mount it; so does a copy that keeps the times (``cp -p``, ``rsync -a``), and so do files rebuilt
    with the same sizes and times. ``local_identity`` tells these from each other, on one machine.
    """

    root: bytes
    """What every path begins with, up to and including the last slash."""
    names: Bytes
    """The rest of every path, one after the other, u8[total]."""
    offsets: Offsets
    """Where each name begins in ``names``, and where the last ends, i64[N + 1]."""
    sizes: Offsets
    """Bytes of each file, i64[N]."""
    ctimes_ns: Offsets
    """Change time of each file, which nothing but the kernel sets, i64[N]."""
    fingerprint: str

    def name(self, index: int) -> bytes:
        """Return one name."""
        begin, end = self.offsets[index : index + 2]
        return self.names[begin:end].tobytes()

    @property
    def local_identity(self) -> str:
        """Hash of the change times.

        Without device and inode numbers, as those of network and FUSE mounts do not last from mount
        to mount.
        """
        return _digest(self.ctimes_ns)


def list_paths(paths: Iterable[AnyPath], threads: int) -> Listing:
    """Return the listing of these files, in this order; ``threads`` of them are asked at once.

    Relative paths are taken from the current directory. Raises as :func:`list_names`, and
    :class:`ConfigError` when there are no paths or one of them is not a path.
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise ConfigError(f"paths={paths!r} is one path: give a list of paths")
    here = os.path.join(os.fsencode(Path.cwd()), b"")  # noqa: PTH118
    try:
        given = map(os.fsencode, paths)
        full = [path if path[:1] == b"/" else here + path for path in given]
    except TypeError as error:
        raise ConfigError(f"paths has something that is not a path: {error}") from error
    if not full:
        raise ConfigError("paths is empty: a source needs at least one file")
    root = _common_directory(min(full), max(full))
    return list_names(root, [path[len(root) :] for path in full], threads)


def _common_directory(smallest: bytes, largest: bytes) -> bytes:
    """Return the deepest directory that all paths sorted between these two are in, with a slash."""
    root = smallest[: smallest.rindex(b"/") + 1]
    while not largest.startswith(root):
        root = root[: root[:-1].rindex(b"/") + 1]
    return root


def list_names(root: bytes, names: list[bytes], threads: int) -> Listing:
    """Return the listing of the files ``root + name``; ``threads`` of them are asked at once.

    Raises :class:`SampleNotFound` for a file that is not there, :class:`SampleCorrupt` for
    something that is not a file, :class:`SourceUnavailable` for any other failure of the
    storage, and :class:`ConfigError` for a name with a NUL byte.
    """
    offsets = offsets_of(np.fromiter(map(len, names), np.int64, len(names)))
    packed = np.frombuffer(b"".join(names), np.uint8)
    if (packed == 0).any() or b"\0" in root:
        raise ConfigError("a path contains a NUL byte, which no file system allows")
    sizes, mtimes_ns, ctimes_ns = (np.empty_like(offsets[1:]) for _ in range(3))
    status = np.empty(len(names), np.int32)
    Reader(threads).stat(root, packed, offsets, sizes, mtimes_ns, ctimes_ns, status)
    if status.any():
        first = int(np.flatnonzero(status)[0])
        raise failure(os.fsdecode(root + names[first]), int(status[first]))
    fingerprint = _digest(offsets, packed, sizes, mtimes_ns)
    return Listing(root, packed, offsets, sizes, ctimes_ns, fingerprint)


def _digest(*parts: Bytes | Offsets) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"stoker.files")
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def failure(path: str, status: int, listed: int | None = None) -> SourceError:
    """Return the error for what the core's ``Reader`` said of a file.

    ``listed`` is the size in bytes it had when the listing was made, when that is known.
    """
    if status in (Reader.SHRANK, Reader.GREW):
        verb = "shrank" if status == Reader.SHRANK else "grew"
        return SampleCorrupt(
            f"{path} {verb} since it was listed with {listed} bytes: {_LIST_AGAIN}"
        )
    if status == Reader.NOT_A_FILE:
        return SampleCorrupt(f"{path} is not a regular file: leave it out of the data set")
    reason = os.strerror(status)
    if status in (errno.ENOENT, errno.ENOTDIR):
        return SampleNotFound(f"{path}: {reason}: put it back, or {_LIST_AGAIN}")
    if status in (errno.EACCES, errno.EPERM):
        return SourceUnavailable(f"{path}: {reason}: let this user (id {os.geteuid()}) read it")
    return SourceUnavailable(f"{path}: {reason}: the storage failed; see the system's log")


class FileSource(HeldSource):
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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reader = None if self._closed else Reader(self._threads)

    def name(self, sample_id: int) -> str:
        """Return the file's path."""
        begin, end = self._offsets.array[sample_id : sample_id + 2]
        return os.fsdecode(self._root + self._names.array[begin:end].tobytes())

    def at_hand(self, ids: npt.NDArray[np.uint32]) -> float:
        """Return the share of files ``u32[n]`` in the page cache; 0 where the kernel does not say.

        Looks at their first and last bytes. What is slow to open, as on a network, is not at hand,
        and no further file is looked at if the first ones are.
        """
        if self._drop_page_cache:
            return 0.0
        found = 0
        for sample in ids.tolist():
            began = time.monotonic()
            is_cached = _is_cached(self.name(sample), int(self._sizes.array[sample]))
            took = time.monotonic() - began
            found += is_cached and took < _SLOW_TO_OPEN
            if took > _TOO_SLOW and not found:
                break
        return found / max(1, len(ids))

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the contents in one array; see :meth:`Source.read_packed`."""
        reader = self._reader
        self._check_open()
        assert reader is not None
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

    def close(self) -> None:
        """Stop the threads of this process; further reads raise."""
        super().close()
        self._reader = None


def _is_cached(path: str, size: int) -> bool:
    """Whether both ends of a file are in the page cache."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        byte = [bytearray(1)]
        return all(os.preadv(file, byte, at, os.RWF_NOWAIT) for at in {0, max(0, size - 1)})
    except OSError:  # not there, or a file system that cannot tell
        return False
    finally:
        os.close(file)


def check_threads(threads: int) -> int:
    """Return ``threads``; raises ConfigError unless it is between 1 and 1024."""
    if not 1 <= threads <= 1024:
        raise ConfigError(f"threads={threads} is out of range: give 1 to 1024")
    return threads
