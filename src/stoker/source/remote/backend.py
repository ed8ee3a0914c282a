"""The interface of one kind of storage, how it can fail, and which of them an address means."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from stoker.errors import ConfigError, redacted

UNKNOWN_TAG = 0
"""The tag of an object of which the storage does not say what version it is."""
OBJECT_SCHEMES = frozenset(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
)
"""What obstore reads; anything else is left to fsspec."""
_SECRET = ("key", "secret", "token", "password", "credential", "sas", "signature")


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
    is_encrypted: bool = True
    """Whether addresses may be such that certificates have to be checked."""


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

    def direct(self) -> Direct | None:
        """Return how an HTTP client gets objects without a backend; None where it needs one."""
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


@dataclass(frozen=True)
class ObstoreLocation:
    """A bucket, container, host or directory that obstore reads."""

    root: str = field(repr=False)
    """Like ``s3://bucket``, or ``https://user:password@host``."""
    options: bytes = field(repr=False)
    """Pickled dictionary of options; they may hold classes that only the helper should load."""

    def open(self, concurrency: int) -> Backend:
        """Return an obstore client for it; raises Fault for options it refuses."""
        from stoker.source.remote.obstore_backend import ObstoreBackend

        return ObstoreBackend(self.root, self.options, concurrency)

    def direct(self) -> Direct | None:
        """Return how an HTTP client gets objects of a web server; None of other storages."""
        from stoker.source.remote.obstore_backend import plain_direct

        return plain_direct(self.root, self.options)


@dataclass(frozen=True)
class FsspecLocation:
    """A file system that fsspec knows."""

    root: str
    """Like ``ftp://``; keys are the paths that its file system gives them."""
    options: bytes = field(repr=False)
    """Pickled dictionary of options."""

    def open(self, concurrency: int) -> Backend:
        """Return the file system; raises Fault for options it refuses."""
        from stoker.source.remote.fsspec_backend import FsspecBackend

        return FsspecBackend(self.root, self.options)

    def direct(self) -> None:
        """Return None: fsspec reads."""


@dataclass(frozen=True)
class LocalLocation:
    """The files of this machine; keys are absolute paths."""

    root: str = "file://"

    def open(self, concurrency: int) -> Backend:
        """Return the backend."""
        return LocalBackend()

    def direct(self) -> None:
        """Return None: files are not behind HTTP."""


@dataclass(frozen=True)
class Address:
    """A parsed address."""

    location: Location
    root: str
    """What is before every key when a sample is named; holds no secrets."""
    prefix: str
    """The rest: a key or the beginning of keys."""
    question: str
    """What tells listings of this location from those of others; holds no secrets."""

    @property
    def lists_in_order(self) -> bool:
        """Whether a listing can start at any key, at the cost of one request."""
        return self.root.partition("://")[0] in ("s3", "gs")


def address_of(
    url: str, storage_options: Mapping[str, Any] | None = None, *, by_fsspec: bool = False
) -> Address:
    """Return what ``url`` means to obstore, or ``by_fsspec`` to fsspec.

    Raises :class:`ConfigError` for an address without a scheme, options that do not pickle, and
    when the package that is needed is not installed.
    """
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found or not scheme:
        raise ConfigError(f"url={url!r} has no scheme: give one like s3://bucket/prefix")
    options = dict(storage_options or {})
    pickled = _pickled(options)
    if by_fsspec:
        _need("fsspec")
        root, prefix = _split_for_fsspec(url, scheme)
        question = _question(redacted(url), options)
        return Address(FsspecLocation(f"{scheme}://", pickled), root, prefix, question)
    if scheme not in OBJECT_SCHEMES:
        raise ConfigError(f"url={url!r}: obstore does not read {scheme}://, use FsspecSource")
    _need("obstore")
    root, prefix = _split_for_obstore(url, scheme, rest)
    shown = redacted(root)
    return Address(ObstoreLocation(root, pickled), shown + "/", prefix, _question(shown, options))


def local_address(prefix: str) -> Address:
    """Return the address of files on this machine whose paths begin with ``prefix``."""
    return Address(LocalLocation(), "", prefix, "")


def _split_for_obstore(url: str, scheme: str, rest: str) -> tuple[str, str]:
    """Return the root without its last slash, and the key."""
    if scheme == "file":
        return "file://", rest.lstrip("/")
    if scheme in ("http", "https"):
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            raise ConfigError(
                f"url={url!r} has a query or a fragment, which cannot be kept: give the plain "
                "address, and credentials as storage_options={'default_headers': ...}"
            )
        rest = parts.netloc + unquote(parts.path)
    host, _, key = rest.partition("/")
    if not host:
        raise ConfigError(f"url={url!r} names no bucket or host")
    return f"{'s3' if scheme == 's3a' else scheme}://{host}", key


def _split_for_fsspec(url: str, scheme: str) -> tuple[str, str]:
    """Return what is shown before a path, and the path as its file system wants it."""
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(scheme)
        path = kind._strip_protocol(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"url={url!r}: fsspec cannot read {scheme}://: {error}") from error
    trailing = "/" if url.endswith("/") and not path.endswith("/") else ""
    return f"{scheme}://", path + trailing


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: run pip install 'stoker[cloud]'")


def _pickled(options: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(options)
    except Exception as error:
        raise ConfigError(
            f"storage_options do not pickle ({error}): the process that reads gets a copy of "
            "them, so give the class as credential_provider, not an object that holds a session"
        ) from error


def _question(location: str, options: dict[str, Any]) -> str:
    """Return what decides what the location contains: options, but no secret."""
    plain = {
        name: value
        for name, value in options.items()
        if isinstance(value, str | bool | int) and not any(word in name.lower() for word in _SECRET)
    }
    return repr((location, sorted(plain.items())))
