"""Reads ranges of files on this machine: for tar shards in a folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from stoker.source.remote.backend import Entry, Fault, Got, Why, tag_of


class LocalBackend:
    """Files by absolute path; see :class:`stoker.source.remote.backend.Backend`.

    A file is opened for each read, so nothing is held and a fork changes nothing.
    """

    def pages(self, prefix: str, after: str = "") -> Iterator[list[Entry]]:
        """Yield the regular files directly in the folder of ``prefix`` that begin with it."""
        folder, _, begin = prefix.rpartition("/")
        try:
            names = sorted(name for name in os.listdir(folder or "/") if name.startswith(begin))  # noqa: PTH208
        except OSError as error:
            raise _fault(error) from error
        paths = [f"{folder}/{name}" for name in names]
        yield [self.head(path) for path in paths if path > after and os.path.isfile(path)]  # noqa: PTH113

    def folders(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """Return what is directly below: no folders, because shards lie in one."""
        return [], [entry for page in self.pages(prefix) for entry in page]

    def head(self, key: str) -> Entry:
        """Return size and version of one file."""
        try:
            return _entry(key, os.stat(os.fsencode(key)))  # noqa: PTH116
        except OSError as error:
            raise _fault(error) from error

    def get(self, key: str, start: int, length: int) -> Got:
        """Return bytes of one file; see :meth:`Backend.get`."""
        try:
            fd = os.open(os.fsencode(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = _entry(key, os.fstat(fd))
                if length < 0:
                    start, length = 0, found.size
                return Got(_read(fd, start, length), found.size, found.tag)
            finally:
                os.close(fd)
        except OSError as error:
            raise _fault(error) from error

    def renew(self) -> None:
        """Do nothing: files have no credentials."""


def _read(fd: int, start: int, length: int) -> memoryview:
    """Return the bytes, fewer where the file ends."""
    into = memoryview(bytearray(length))
    done = 0
    while done < length:
        count = os.preadv(fd, [into[done:]], start + done)
        if count == 0:
            break
        done += count
    return into[:done]


def _entry(key: str, info: os.stat_result) -> Entry:
    if not stat.S_ISREG(info.st_mode):
        raise Fault(Why.INVALID, f"{key} is not a regular file")
    return Entry(os.fsencode(key), info.st_size, tag_of(info.st_size, info.st_mtime_ns))


def _fault(error: OSError) -> Fault:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Fault(Why.NOT_FOUND, str(error))
    if error.errno in (errno.EACCES, errno.EPERM):
        return Fault(Why.REFUSED, str(error))
    return Fault(Why.TRANSIENT, str(error))
