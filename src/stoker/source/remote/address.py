"""What an address means: which backend reads it, and from which key on."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from stoker.errors import ConfigError, redacted
from stoker.source.remote.backend import Backend, LocalBackend, Location

OBJECT_SCHEMES = frozenset(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
)
"""What obstore reads; anything else is left to fsspec."""

_SECRET = ("key", "secret", "token", "password", "credential", "sas", "signature")


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


@dataclass(frozen=True)
class LocalLocation:
    """The files of this machine; keys are absolute paths."""

    root: str = "file://"

    def open(self, concurrency: int) -> Backend:
        """Return the backend."""
        return LocalBackend()


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
