"""The files of a folder that a group shares: who may read them, and what is read of them.

A class of rights is what decides about reading: device, owner, group, mode and access lists of the
folder, of every folder on the way, and of the file. Only files of the classes that were found are
ever read; they are opened by way of folders that were opened before, never over a link, so that
what is read is what the rights are of. Rights that change later count for what is read later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError
from stoker.pool.group_pool import MOST_PROOFS
from stoker.source.base import Errors, PackedRead, PackedSource
from stoker.source.image_folder import ImageFolderSource
from stoker.source.packed import pack
from stoker.types import parse_bytes

_READS = 32  # files that are read at once for one user
_LOOKED_AT = 512  # files whose rights are looked at to find the classes there are
_NO_LIST = {errno.ENODATA, errno.EOPNOTSUPP}
# What file systems decide by, beside owner, group and mode.
_LISTS = ("system.posix_acl_access", "system.nfs4_acl", "system.cifs_acl", "security.selinux")

Rights = tuple[tuple[Any, ...], ...]
"""What decides about reading a file, of each folder on the way and of the file."""


@dataclass(frozen=True)
class SharedFolder:
    """A folder of class folders with images, and the memory that its cache may have."""

    path: Path
    size: str = "100%"
    """Payload: bytes, or a share of those of the folder."""

    @staticmethod
    def parse(text: str) -> SharedFolder:
        """Return what ``DIR`` or ``DIR=SIZE`` says; ConfigError for a size that is none."""
        path, equals, size = text.rpartition("=")
        folder = SharedFolder(Path(path), size) if equals else SharedFolder(Path(text))
        parse_bytes(folder.size, of=1, name=f"share {text!r}")
        return folder


class Folder:
    """A folder held open, below which files are opened without following links."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Not before the last read: its number could be another folder's by then.
        weakref.finalize(self, os.close, self._fd)

    def open(self, name: str) -> tuple[int, Rights]:
        """Return a descriptor of the file ``name``, to read, and what decides about reading it.

        Raises OSError, also for a link on the way, and where rights cannot be found out.
        """
        *folders, file = name.split("/")
        at, rights = os.dup(self._fd), []
        try:
            rights.append(_rights(at))
            for folder in folders:
                below = os.open(
                    folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
                )
                os.close(at)
                at = below
                rights.append(_rights(at))
            fd = os.open(
                file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at
            )
        finally:
            os.close(at)
        try:
            return fd, (*rights, _rights(fd))
        except BaseException:
            os.close(fd)
            raise


def _rights(fd: int) -> tuple[Any, ...]:
    status = os.fstat(fd)
    lists = []
    for name in _LISTS:
        try:
            lists.append(os.getxattr(fd, name))
        except OSError as error:
            if error.errno not in _NO_LIST:
                raise
            lists.append(b"")
    return status.st_dev, status.st_uid, status.st_gid, status.st_mode, *lists


def proves(proof: int, fd: int, rights: Rights) -> bool:
    """Whether ``proof`` shows that who opened it may read what has these ``rights``, as ``fd`` has.

    That is: it is open for reading, and of the very file.
    """
    flags = fcntl.fcntl(proof, fcntl.F_GETFL)
    # A descriptor of a mere path can be had without permission to read.
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        return False
    status = os.fstat(proof)
    if not (stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(fd))):
        return False
    # By another name it can be reached by who may not enter these folders.
    return status.st_nlink == 1 or all(map(_lets_everybody_in, rights[:-1]))


def _lets_everybody_in(rights: tuple[Any, ...]) -> bool:
    _, _, _, mode, *lists = rights
    return mode & 0o111 == 0o111 and not any(lists[:3])


class GroupFiles:
    """The files below ``path``, of the classes of rights that are found there now.

    Safe in any thread. Raises :class:`~stoker.errors.ConfigError` where none can be read, and the
    errors of :class:`~stoker.source.image_folder.ImageFolderSource`.
    """

    def __init__(self, path: Path) -> None:
        self.listing = ImageFolderSource(path.resolve())
        self.identity = self.listing.fingerprint, self.listing.local_identity
        self.sizes = self.listing.sizes
        self._root = os.path.join(path.resolve(), "")  # noqa: PTH118
        self._folder = Folder(path.resolve())
        self._classes = self._find_classes()

    def __len__(self) -> int:
        return len(self.sizes)

    def examples(self) -> list[int]:
        """Return a file of each class, which a member must be able to read, as far as there is."""
        found = []
        for rights, samples in self._classes.items():
            found += [sample for sample in samples if self._rights(sample) == rights][:1]
        return found

    def accepts(self, samples: Sequence[int], proofs: Sequence[int]) -> bool:
        """Whether ``proofs`` are of these :meth:`examples`, each open to read, of all classes."""
        shown = set()
        for sample, proof in zip(samples, proofs, strict=False):
            try:
                fd, rights = self._open(sample)
            except OSError:
                return False
            try:
                if not proves(proof, fd, rights):
                    return False
            finally:
                os.close(fd)
            shown.add(rights)
        return shown >= self._classes.keys()

    def read(self, sample: int) -> bytes:
        """Return a file of a known class; SourceError or OSError if there is none such."""
        fd, rights = self._open(sample)
        try:
            if rights not in self._classes:
                raise SampleNotFound(f"{self.listing.name(sample)} is not read for all", [sample])
            size, data = int(self.sizes[sample]), bytearray()
            while part := os.pread(fd, size + 1 - len(data), len(data)):
                data += part
        finally:
            os.close(fd)
        if len(data) != size:
            raise SampleCorrupt(f"{self.listing.name(sample)} has changed", [sample])
        return bytes(data)

    def _open(self, sample: int) -> tuple[int, Rights]:
        return self._folder.open(self.listing.name(sample).removeprefix(self._root))

    def _rights(self, sample: int) -> Rights | None:
        """Return what decides about reading a file now; None if it cannot be opened."""
        try:
            fd, rights = self._open(sample)
        except OSError:  # a link, or not for us
            return None
        os.close(fd)
        return rights

    def _find_classes(self) -> dict[Rights, list[int]]:
        """Return the commonest classes of rights, each with some files of it."""
        count = len(self.sizes)
        some = np.random.default_rng().choice(count, min(count, _LOOKED_AT), replace=False)
        found: dict[Rights, list[int]] = {}
        for sample in some.tolist():
            if (rights := self._rights(sample)) is not None:
                found.setdefault(rights, []).append(sample)
        if not found:
            raise ConfigError(f"{self._root}: no file can be read without following a link")
        commonest = sorted(found, key=lambda rights: -len(found[rights]))
        return {rights: found[rights] for rights in commonest[:MOST_PROOFS]}


class ReadableFiles(PackedSource):
    """Files that may be read, by threads of its own."""

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(_READS, "stoker-group-read")

    def __len__(self) -> int:
        return len(self._files)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each file."""
        return self._files.sizes

    @property
    def fingerprint(self) -> str:
        """That of the listing."""
        return self._files.listing.fingerprint

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the files that may be read; the others have errors."""
        wanted = np.asarray(ids, np.uint32).tolist()
        read = list(self._threads.map(self._read, wanted))
        errors: Errors = {
            row: found for row, found in enumerate(read) if isinstance(found, SourceError)
        }
        return *pack([b"" if isinstance(found, SourceError) else found for found in read]), errors

    def _read(self, sample: int) -> bytes | SourceError:
        try:
            return self._files.read(sample)
        except SourceError as error:
            return error
        except OSError as error:
            return SampleNotFound(f"{self._files.listing.name(sample)}: {error}", [sample])

    def close(self) -> None:
        """Read no more; reads under way are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
