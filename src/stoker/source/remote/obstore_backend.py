"""Reads S3, Google Cloud Storage, Azure, HTTP and local directories through obstore, and writes."""

from __future__ import annotations

import errno
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote

from stoker.errors import ConfigError
from stoker.source.pace import Retry
from stoker.source.remote.backend import (
    UNKNOWN_TAG,
    Address,
    Direct,
    Entry,
    Fault,
    Got,
    ObstoreLocation,
    Why,
    tag_of,
)

_T = TypeVar("_T")
_PAGE = 1000  # what S3 returns at most for one request
_STATUS = re.compile(r"status code: (\d{3})")
_EXPIRED = re.compile(
    r"ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidToken|"
    r"InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed"
)
_THROTTLED = re.compile(r"SlowDown|Throttl|RequestLimitExceeded|ServerBusy|TooManyRequests")
# Only the dump of the structures behind an error says why there is no connection.
_NO_CONNECTION = re.compile(r"ConnectError\(")
_REASON = re.compile(r'(?:message|error): "([^"]+)"')
_METADATA = re.compile(
    r"latest/api/token|security-credentials|computeMetadata|metadata/identity|169\.254\."
)
# A "builder error" is a request that could not even be made, such as one for an address of plain
# HTTP without leave to use it.
_HOPELESS = (
    "builder error", "non-partial response", "Content-Length Header missing", "invalid path",
)  # fmt: skip
# A stall shows sooner than in obstore's own 30 seconds, and a large slow body may take longer.
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "15s", "timeout": "300s"}
_CLIENT_OPTIONS = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers",
    "http1_only", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url",
    "proxy_ca_certificate", "proxy_excludes", "randomize_addresses", "read_timeout",
    "root_certificate", "timeout", "user_agent",
}  # fmt: skip

_HTTP = {
    "allow_http", "connect_timeout", "default_headers", "http1_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "randomize_addresses", "read_timeout", "retry_config", "timeout",
    "user_agent",
}  # fmt: skip
_S3 = _HTTP - {"default_headers"} | {
    "access_key_id", "bucket", "bucket_name", "credential_provider", "default_region", "endpoint",
    "endpoint_url", "imdsv1_fallback", "metadata_endpoint", "region", "secret_access_key",
    "session_token", "token", "virtual_hosted_style_request",
}  # fmt: skip
_PLAIN = ("http", "https")
# Options under which an HTTP client of any kind gets what obstore gets.
_DIRECT: dict[str, Set[str]] = {"http": _HTTP, "https": _HTTP, "s3": _S3, "s3a": _S3}
_SIGNED_FOR = timedelta(hours=1)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min)\s*")
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0}
Version = dict[str, str]
"""The version of an object, as the storage states it."""
_RETRY = Retry(deadline=30.0)
_AGAIN = (Why.THROTTLED, Why.CUT, Why.UNREACHABLE, Why.TRANSIENT)
_PART = 8 << 20  # bytes of a large object that are sent at once


class ObstoreBackend:
    """One obstore client; see :class:`stoker.source.remote.backend.Backend`."""

    def __init__(self, root: str, options: bytes, concurrency: int) -> None:
        """Make the client; ``concurrency`` connections are kept. Raises Fault for bad options."""
        import obstore

        self._obstore = obstore
        self._root = root
        self._options, self._concurrency = options, concurrency
        self._store = self._make()

    def _make(self) -> Any:
        from obstore import store

        scheme = self._root.partition("://")[0]
        make = _stores(store)[scheme]
        try:
            # Unpickled each time: a provider of credentials starts without old ones.
            return make(self._root, **_arguments(pickle.loads(self._options), self._concurrency))
        except Exception as error:
            raise Fault(Why.INVALID, f"obstore refused {self._root}: {_first(error)}") from error

    def pages(self, prefix: str, after: str = "") -> Iterator[list[Entry]]:
        """Yield pages of objects; see :meth:`Backend.pages`."""
        # obstore takes whole path segments as a prefix; what is finer is sieved here.
        folder, _, rest = prefix.rpartition("/")
        pages = self._ask(
            lambda: self._obstore.list(
                self._store, folder or None, offset=after or None, chunk_size=_PAGE
            )
        )
        begins = prefix.encode()
        for page in self._each(pages):
            entries = [_entry(meta) for meta in page]
            yield [found for found in entries if found.key.startswith(begins)] if rest else entries

    def _each(self, pages: Any) -> Iterator[Any]:
        while True:
            page = self._ask(lambda: next(pages, None))
            if page is None:
                return
            yield page

    def folders(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """Return what is directly below a folder; see :meth:`Backend.folders`."""
        found = self._ask(
            lambda: self._obstore.list_with_delimiter(self._store, prefix.rstrip("/") or None)
        )
        return [name + "/" for name in found["common_prefixes"]], [
            _entry(meta) for meta in found["objects"]
        ]

    def head(self, key: str) -> Entry:
        """Return what the storage says of one object."""
        return _entry(self._ask(lambda: self._obstore.head(self._store, key)))

    def get(self, key: str, start: int, length: int) -> Got:
        """Return bytes of one object; see :meth:`Backend.get`."""
        options: Any = None if length < 0 else {"range": (start, start + length)}

        def request() -> Got:
            result = self._obstore.get(self._store, key, options=options)
            meta = _entry(result.meta)
            return Got(memoryview(result.bytes()), meta.size, meta.tag)

        return self._ask(request)

    def direct(self) -> Direct | None:
        """Return how an HTTP client gets objects: plainly, or of S3 by addresses that are signed.

        None for other storages, and where an option is set that only obstore knows.
        """
        if self._root.partition("://")[0] in _PLAIN:
            return plain_direct(self._root, self._options)
        return _direct(self._root, self._options, self._signed)

    def _signed(self, keys: Sequence[str]) -> list[str]:
        sign = self._obstore.sign
        return list(self._ask(lambda: sign(self._store, "GET", list(keys), _SIGNED_FOR)))

    def renew(self) -> None:
        """Recreate the client: its provider of credentials is asked again."""
        self._store = self._make()

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            return request()
        except Exception as error:
            raise self._fault(error) from error
        except BaseException as error:
            # What obstore does when an address makes no sense; it is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise Fault(Why.INVALID, f"obstore gave up: {_first(error)}") from error

    def _fault(self, error: Exception) -> Fault:
        """Return what obstore's exception means."""
        from obstore import exceptions

        text = _first(error)
        if "builder error" in text:
            text += " (an endpoint of plain HTTP needs the option allow_http=True)"
        if isinstance(error, FileNotFoundError):
            return Fault(Why.NOT_FOUND, text)
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return Fault(Why.REFUSED, text)
        if isinstance(error, ValueError | exceptions.NotSupportedError):
            return Fault(Why.INVALID, text)
        why, dump = _why(text), str(error)[len(text) :]
        if why is Why.TRANSIENT and _NO_CONNECTION.search(dump):
            reasons = _REASON.findall(dump)
            return Fault(Why.UNREACHABLE, f"{text}: {reasons[-1]}" if reasons else text)
        return Fault(why, text)


def _why(text: str) -> Why:
    """Return what a generic error is about; only its text tells."""
    status = _STATUS.search(text)
    code = int(status[1]) if status else 0
    if _EXPIRED.search(text):
        return Why.REFUSED
    if _METADATA.search(text) or (not code and "redential" in text):
        return Why.NO_CREDENTIALS
    if code in (429, 503) or _THROTTLED.search(text):
        return Why.THROTTLED
    if code == 501 or (300 <= code < 500 and code != 408):
        return Why.INVALID
    if "body error" in text:
        return Why.CUT
    return Why.INVALID if any(hint in text for hint in _HOPELESS) else Why.TRANSIENT


def plain_direct(root: str, options: bytes) -> Direct | None:
    """Return how an HTTP client gets objects of a web server; None where only obstore does."""
    if root.partition("://")[0] not in _PLAIN:
        return None
    return _direct(root, options, lambda keys: [f"{root}/{quote(key)}" for key in keys])


def _direct(
    root: str, pickled: bytes, addresses: Callable[[Sequence[str]], list[str]]
) -> Direct | None:
    scheme = root.partition("://")[0]
    options = pickle.loads(pickled)
    options |= options.pop("client_options", {})
    names = {name.lower().removeprefix("aws_") for name in options}
    if scheme not in _DIRECT or not names <= _DIRECT[scheme]:
        return None
    timeouts = _TIMEOUTS | {name: options[name] for name in _TIMEOUTS if name in options}
    seconds = {name: _seconds(value) for name, value in timeouts.items()}
    if None in seconds.values():
        return None
    given = options.get("default_headers", {})
    headers = {str(name): str(value) for name, value in given.items()}
    if "user_agent" in options:
        headers["User-Agent"] = str(options["user_agent"])
    return Direct(
        addresses,
        headers,
        cast(float, seconds["connect_timeout"]),
        cast(float, seconds["read_timeout"]),
        cast(float, seconds["timeout"]),
        is_encrypted=scheme != "http",
    )


def _seconds(duration: Any) -> float | None:
    """Return the seconds of what obstore takes as a duration; None for what is not plain."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    found = _DURATION.fullmatch(str(duration))
    return float(found[1]) * _UNITS[found[2]] if found else None


def _first(error: BaseException) -> str:
    """Return the message without obstore's dump of the structures behind it."""
    return str(error).partition("\n\nDebug source:")[0]


def _entry(meta: Any) -> Entry:
    version = meta["e_tag"] or meta["version"]
    if not version and meta["last_modified"].timestamp() > 0:
        version = meta["last_modified"].isoformat()
    tag = tag_of(version) if version else UNKNOWN_TAG
    return Entry(meta["path"].encode(), meta["size"], tag)


def _stores(store: Any) -> dict[str, Callable[..., Any]]:
    azure = store.AzureStore.from_url
    return {
        "s3": store.S3Store.from_url,
        "s3a": store.S3Store.from_url,
        "gs": store.GCSStore.from_url,
        **dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), azure),
        "http": store.HTTPStore.from_url,
        "https": store.HTTPStore.from_url,
        "file": lambda root, **_: store.LocalStore("/"),
    }


def _arguments(options: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """Return the options as obstore wants them: those of its HTTP client apart."""
    client = {
        **_TIMEOUTS,
        "pool_max_idle_per_host": str(concurrency),
        **{name: value for name, value in options.items() if name in _CLIENT_OPTIONS},
        **options.get("client_options", {}),
    }
    rest = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    if isinstance(rest.get("credential_provider"), type):
        # Many providers hold a session, which does not pickle; their class does.
        rest["credential_provider"] = rest["credential_provider"]()
    # Retries are the engine's, which knows the deadline and tells throttling apart.
    return {"retry_config": {"max_retries": 0}, **rest, "client_options": client}


class Seen(NamedTuple):
    """An object as it was read."""

    content: bytes
    version: Version


class Writer:
    """Objects of one bucket, by whole keys, that are written as well as read.

    Temporary failures are retried for 30 seconds. Thread-safe; for the process that made it. All
    methods raise :class:`FileNotFoundError` for an object that is not there, and :class:`OSError`
    when the storage fails.

    Raises :class:`~stoker.errors.ConfigError` for an address that obstore does not write to, and
    options that it refuses.
    """

    def __init__(self, address: Address, concurrency: int) -> None:
        """Write to where ``address`` is; ``concurrency`` threads will."""
        location = address.location
        if not isinstance(location, ObstoreLocation):
            raise ConfigError(f"{address.root} cannot be written to: use a bucket, like s3://")
        self._where = address.root
        self._draw = random.Random()
        try:
            self._backend = _Backend(location.root, location.options, concurrency)
        except Fault as fault:
            raise ConfigError(f"{fault}: check url and storage_options") from fault

    def first_page(self, prefix: str) -> list[Entry]:
        """Return some of the objects whose keys begin with ``prefix``; none if there are none."""
        return self._until_had(lambda: next(iter(self._backend.pages(prefix)), []))

    def all(self, prefix: str) -> list[Entry]:
        """Return all objects whose keys begin with ``prefix``."""
        return self._until_had(lambda: [e for page in self._backend.pages(prefix) for e in page])

    def head(self, key: str) -> Entry:
        """Return what the storage says of an object."""
        return self._until_had(lambda: self._backend.head(key))

    def get(self, key: str, start: int = 0, length: int = -1) -> memoryview:
        """Return an object, or so many bytes of it from ``start``, with one request."""
        return self._until_had(lambda: self._backend.get(key, start, length)).data

    def put(self, key: str, data: bytes) -> None:
        """Put an object, whole, with one request."""
        self._until_had(lambda: self._backend.put(key, data))

    def put_file(self, key: str, path: Path) -> None:
        """Put what is in a file, in several requests if it is large; it is there whole or not."""
        self._until_had(lambda: self._backend.put_file(key, path))

    def look(self, key: str) -> Seen | None:
        """Return a small object and its version; None if there is none."""
        try:
            return self._until_had(lambda: self._backend.look(key))
        except FileNotFoundError:
            return None

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        """Write an object in place of ``version``, None: if there is none; return its version then.

        None if it is another by now.
        """
        return self._until_had(lambda: self._backend.replace(key, content, version))

    def delete(self, keys: list[str]) -> None:
        """Remove objects, with one request."""
        if keys:
            self._until_had(lambda: self._backend.delete(keys))

    def _until_had(self, request: Callable[[], _T]) -> _T:
        """Return the answer, retrying as long as that is useful; raises OSError."""
        begin = time.monotonic()
        renewed = False
        for failures in count(1):
            try:
                return request()
            except Fault as fault:
                if fault.why is Why.NOT_FOUND:
                    raise FileNotFoundError(errno.ENOENT, str(fault), self._where) from fault
                if fault.why is Why.REFUSED and not renewed:
                    renewed = True
                    self._backend.renew()
                    continue
                over = _RETRY.is_over(failures, time.monotonic() - begin)
                if fault.why not in _AGAIN or over:
                    raise OSError(errno.EIO, str(fault), self._where) from fault
                time.sleep(_RETRY.wait(failures, fault.why is Why.THROTTLED, self._draw))
        raise AssertionError("count() does not end")


class _Backend(ObstoreBackend):
    """An obstore client that also writes."""

    def put(self, key: str, data: bytes) -> None:
        """Put one object, whole, with one request; raises Fault."""
        self._ask(lambda: self._obstore.put(self._store, key, data, use_multipart=False))

    def put_file(self, key: str, path: Path) -> None:
        """Put the content of a file, in parts if it is large; raises Fault."""
        is_large = path.stat().st_size > _PART
        self._ask(
            lambda: self._obstore.put(
                self._store, key, path, use_multipart=is_large, chunk_size=_PART
            )
        )

    def look(self, key: str) -> Seen:
        """Return one small object; raises Fault."""

        def request() -> Seen:
            result = self._obstore.get(self._store, key)
            return Seen(bytes(result.bytes()), _version(result.meta))

        return self._ask(request)

    def replace(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Put one object if it is that version; None if it is another one. Raises Fault."""
        from obstore import exceptions

        def request() -> Version | None:
            try:
                put = self._obstore.put(
                    self._store, key, data, mode=version or "create", use_multipart=False
                )
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return None
            return _version(put)

        return self._ask(request)

    def delete(self, keys: list[str]) -> None:
        """Remove objects; raises Fault."""
        self._ask(lambda: self._obstore.delete(self._store, keys))


def _version(told: Any) -> Version:
    """Return what obstore says of the version of an object."""
    return {name: told[name] for name in ("e_tag", "version") if told[name]}
