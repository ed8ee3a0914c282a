"""Copies one file whole: to a temporary name, checked against the source, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20
CHECKSUM = "user.stoker.crc32"
"""Extended attribute of a copy, with the CRC-32 of its bytes as eight hexadecimal digits."""


class SourceChanged(OSError):
    """The source file is not, or not any more, the one that was to be copied."""


class TierFault(OSError):
    """The tier, not the source, failed; ``errno`` says how."""


@dataclass(frozen=True)
class Identity:
    """What makes a source file the same file as before."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """Return the identity of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns)


def copy_file(
    source: Path,
    part: Path,
    final: Path,
    expected: Identity,
    *,
    fsync: bool = False,
    checksum: bool = False,
    begin: Callable[[int], object] = lambda inode: None,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Copy ``source`` to ``final`` by way of ``part``; ``final`` appears whole or not at all.

    The source is read once, from beginning to end. ``begin`` gets the inode of ``part`` and of the
    copy before any byte is in it, ``progress`` every MiB how many bytes are. The copy carries the
    source's modification time, and nobody may write it.
    Raises :class:`SourceChanged` if the source is not ``expected`` or does not stay so,
    :class:`TierFault` if writing fails, and :class:`OSError` as reading does; ``part`` is then
    removed. Threads may copy at the same time, each to names of its own.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        _check(reader, expected)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with _faults_of_tier():
            writer = os.open(part, flags, 0o600)
        try:
            begin(os.fstat(writer).st_ino)
            crc = _transfer(reader, writer, expected.size, progress, checksum)
            _check(reader, expected)
            with _faults_of_tier():
                if checksum:
                    os.setxattr(writer, CHECKSUM, b"%08x" % crc)
                os.utime(writer, ns=(expected.mtime_ns, expected.mtime_ns))
                os.fchmod(writer, 0o400)
                if fsync:
                    os.fsync(writer)
                part.replace(final)
                if fsync:
                    _sync_folder(final.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            os.close(writer)
    finally:
        os.close(reader)


@contextlib.contextmanager
def _faults_of_tier() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierFault(error.errno, error.strerror, error.filename) from error


def is_copy(path: Path, expected: Identity, *, checksum: bool = False) -> bool:
    """Whether ``path`` is a finished copy of that file; with ``checksum``, its bytes are read."""
    try:
        copy = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(copy)
        if not stat.S_ISREG(status.st_mode) or Identity.of(status) != expected:
            return False
        return not checksum or os.getxattr(copy, CHECKSUM) == b"%08x" % _crc(copy)
    except OSError:
        return False
    finally:
        os.close(copy)


def _check(reader: int, expected: Identity) -> None:
    status = os.fstat(reader)
    if not stat.S_ISREG(status.st_mode) or Identity.of(status) != expected:
        raise SourceChanged(errno.ESTALE, "the source file changed while it was copied")


def _transfer(
    reader: int, writer: int, size: int, progress: Callable[[int], object], want_crc: bool
) -> int:
    """Copy ``size`` bytes; return their CRC-32, or 0 where nobody wants it."""
    # Read ahead far, or, of large files, whole requests past the page cache: a few large operations
    # instead of many, and memory is left to what the programs read.
    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    if size > _CHUNK:
        _set_direct(reader, True)
    done = crc = 0
    buffer = memoryview(mmap.mmap(-1, min(_CHUNK, max(1, size))))  # aligned, as such reads must be
    while done < size:
        count = _read(reader, buffer)
        if count == 0:
            raise SourceChanged(errno.ESTALE, "the source file shrank while it was copied")
        if count > size - done:
            raise SourceChanged(errno.ESTALE, "the source file grew while it was copied")
        _write_all(writer, buffer[:count])
        if want_crc:
            crc = zlib.crc32(buffer[:count], crc)
        done += count
        if done < size:
            progress(done)
    return crc


def _read(reader: int, buffer: memoryview) -> int:
    try:
        return os.readv(reader, [buffer])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _set_direct(reader, False)  # the file system takes it only in theory
    return os.readv(reader, [buffer])


def _set_direct(reader: int, wanted: bool) -> None:
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        fcntl.fcntl(reader, fcntl.F_SETFL, flags)


def _write_all(writer: int, data: memoryview) -> None:
    with _faults_of_tier():
        while data:
            data = data[os.write(writer, data) :]


def _crc(reader: int) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    while count := os.readv(reader, [buffer]):
        crc = zlib.crc32(buffer[:count], crc)
    return crc


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
