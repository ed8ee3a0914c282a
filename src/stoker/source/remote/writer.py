"""Writes objects, as obstore can, and tries again as long as that is of use."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stoker.errors import ConfigError
from stoker.source.pace import Retry
from stoker.source.remote.address import Address, ObstoreLocation
from stoker.source.remote.backend import Entry, Fault, Why
from stoker.source.remote.obstore_backend import ObstoreBackend

Version = dict[str, str]
"""The version of an object, as the storage states it."""

_T = TypeVar("_T")
_RETRY = Retry(deadline=30.0)
_AGAIN = (Why.THROTTLED, Why.CUT, Why.UNREACHABLE, Why.TRANSIENT)
_PART = 8 << 20  # bytes of a large object that are sent at once


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
