"""The interface of one kind of storage, and the ways in which it can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from stoker.errors import redacted

UNKNOWN_TAG = 0
"""The tag of an object of which the storage does not say what version it is."""


class Entry(NamedTuple):
    """One object as the storage describes it."""

    key: bytes
    """Its name in the storage, in UTF-8."""
    size: int
    """Bytes."""
    tag: int
    """The version of the object, 64 bits; see :func:`tag_of`."""


class Got(NamedTuple):
    """What a read returned."""

    data: memoryview
    """The bytes, flat."""
    size: int
    """Bytes of the whole object as the storage states them now; -1 if it does not."""
    tag: int
    """The version that was read; ``UNKNOWN_TAG`` if the storage does not say."""


class Why(Enum):
    """Why a request failed, as needed to decide what to do next."""

    NOT_FOUND = "not found"
    """There is no such object. Retrying is useless."""
    REFUSED = "refused"
    """The credentials were rejected: ask for new ones, once."""
    NO_CREDENTIALS = "no credentials"
    """There are none in the usual locations: permanent at the start, temporary later."""
    THROTTLED = "throttled"
    """Too many requests: retry after a longer wait."""
    CUT = "cut"
    """The body ended early: retry."""
    UNREACHABLE = "unreachable"
    """No connection was made (refused, no such host): a wrong address, or an outage. Retry."""
    TRANSIENT = "transient"
    """Any other temporary failure: retry."""
    INVALID = "invalid"
    """The request itself is wrong (a bad option, a bad key). Retrying is useless."""


@dataclass(frozen=True)
class Direct:
    """How anybody with an HTTP client gets whole objects, for a while at least."""

    addresses: Callable[[Sequence[str]], list[str]]
    """Returns an address for each of some keys, which carries what proves the right to read it;
    raises Fault where it cannot."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request."""
    connect_seconds: float = 5.0
    """How long a connection may take."""
    stalled_seconds: float = 15.0
    """How long nothing may come."""
    total_seconds: float = 300.0
    """How long a request may take."""


class Fault(Exception):
    """A request that failed; backends raise nothing else. Pickles."""

    def __init__(self, why: Why, message: str) -> None:
        self.why = why
        self.message = redacted(message)
        super().__init__(why, self.message)

    def __str__(self) -> str:
        return self.message


class Backend(Protocol):
    """A location in one kind of storage. All methods block, and may be called from many threads."""

    def pages(self, prefix: str, after: str = "") -> Iterator[list[Entry]]:
        """Yield pages of the objects whose keys begin with ``prefix`` and sort after ``after``.

        In no particular order, though most storages keep that of the keys.
        """
        ...

    def folders(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """Return what is directly below ``prefix``: folders (with their slash), and objects."""
        ...

    def head(self, key: str) -> Entry:
        """Return what the storage says of one object."""
        ...

    def get(self, key: str, start: int, length: int) -> Got:
        """Return ``length`` bytes from ``start``, fewer where the object ends; all if negative."""
        ...

    def direct(self) -> Direct | None:
        """Return how an HTTP client gets objects; None where one cannot, or not in the same way."""
        ...

    def renew(self) -> None:
        """Forget the credentials, so that the next request asks its provider for new ones."""
        ...


class Location(Protocol):
    """What a backend is made from: describes a location, holds nothing open, pickles."""

    @property
    def root(self) -> str:
        """What the location is called; a rate limit is for all that have the same."""
        ...

    def open(self, concurrency: int) -> Backend:
        """Return a backend that ``concurrency`` threads will use at once; raises Fault."""
        ...


def tag_of(*versions: object) -> int:
    """Return 64 bits that tell versions apart: a hash of an ETag or of what else there is."""
    text = "\0".join(map(str, versions)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


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

    def direct(self) -> None:
        """Return None: files are not behind HTTP."""

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
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return Fault(Why.NOT_FOUND, str(error))
    if error.errno in (errno.EACCES, errno.EPERM):
        return Fault(Why.REFUSED, str(error))
    return Fault(Why.TRANSIENT, str(error))
