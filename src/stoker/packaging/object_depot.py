"""Packages as objects below a prefix of an object store."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

from stoker.errors import ConfigError
from stoker.packaging.lease import EXPIRY, RENEW, Keeper, Lease, Seen, Version
from stoker.source.pace import Retry
from stoker.source.remote.address import Address
from stoker.source.remote.backend import Fault, ObstorePlace, Why
from stoker.source.remote.obstore_backend import ObstoreBackend

MARKER = ".stoker-packages"
"""Object that marks a prefix as one for packages; nothing is removed from one without it."""

_T = TypeVar("_T")
_RETRY = Retry(deadline=30.0)
_CONCURRENCY = 4  # packing, loading, and each of them once more while it lingers
_AGAIN = (Why.THROTTLED, Why.CUT, Why.UNREACHABLE, Why.TRANSIENT)


class ObjectDepot:
    """See :class:`~stoker.packaging.depot.Depot`. Opened in the packaging process only.

    One process at a time uses a ``group`` of names, by a :class:`~stoker.packaging.lease.Lease`,
    for which the storage must know conditional writes; ``holder``, ``renew`` and ``expiry`` are
    those of the lease. One that lost it, and does not know yet, can do no more than store or
    remove packages that the next one finds missing or never looks at: none is named twice.

    Raises :class:`~stoker.errors.ConfigError` where something else lies below the prefix, or the
    address or its options are refused, and :class:`BlockingIOError` if another process uses it.
    """

    def __init__(
        self,
        address: Address,
        group: str,
        holder: str,
        *,
        renew: float = RENEW,
        expiry: float = EXPIRY,
    ) -> None:
        assert isinstance(address.place, ObstorePlace)
        self._prefix = address.prefix.rstrip("/") + "/"
        self._where, self._group = address.root + self._prefix, group
        self._draw = random.Random()
        try:
            self._backend = _Writer(address.place.root, address.place.options, _CONCURRENCY)
        except Fault as fault:
            raise ConfigError(f"{fault}: check url and storage_options") from fault
        self._mark()
        key = f"{self._prefix}.{group}.lease"
        self._lease = Lease(self, key, holder, renew=renew, expiry=expiry)
        self._lease.acquire()
        self._keeper = Keeper(self._lease, renew)

    def names(self) -> list[str]:
        """Return the packages of this group."""
        self._lease.check()
        begin = self._prefix + self._group + "-"
        keys = self._until_had(lambda: [e.key for p in self._backend.pages(begin) for e in p])
        return sorted(key.decode()[len(self._prefix) :] for key in keys)

    def publish(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Put a package with one request."""
        self._lease.check()
        whole = b"".join(pieces)
        self._until_had(lambda: self._backend.put(self._prefix + name, whole))

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes, with one request."""
        return self._until_had(lambda: self._backend.get(self._prefix + name, 0, num_bytes)).data

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages."""
        self._lease.check()
        keys = [self._prefix + name for name in names]
        try:
            self._delete(keys)
        except FileNotFoundError:  # some storages say so, and then may not have gone on
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._delete([key])

    def close(self) -> None:
        """Let others use it."""
        self._keeper.close()

    def look(self, key: str) -> Seen | None:
        """See :class:`~stoker.packaging.lease.Objects`."""
        try:
            return self._until_had(lambda: self._backend.look(key))
        except FileNotFoundError:
            return None

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        """See :class:`~stoker.packaging.lease.Objects`."""
        return self._until_had(lambda: self._backend.replace(key, content, version))

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._until_had(lambda: self._backend.delete(keys))

    def _mark(self) -> None:
        first = self._until_had(lambda: next(iter(self._backend.pages(self._prefix)), []))
        try:
            self._until_had(lambda: self._backend.head(self._prefix + MARKER))
        except FileNotFoundError:
            if first:
                key = first[0].key.decode()
                raise ConfigError(
                    f"{self._where} is not empty and not for Stoker's packages (there is {key!r}): "
                    "give a prefix of their own"
                ) from None
            self._until_had(lambda: self._backend.put(self._prefix + MARKER, b"stoker\n"))

    def _until_had(self, request: Callable[[], _T]) -> _T:
        """Return the answer, asking again as long as it makes sense; raises OSError."""
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


class _Writer(ObstoreBackend):
    """An obstore client that also writes."""

    def put(self, key: str, data: bytes) -> None:
        """Put one object, whole, with one request; raises Fault."""
        self._ask(lambda: self._obstore.put(self._store, key, data, use_multipart=False))

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
