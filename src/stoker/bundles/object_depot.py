"""Packages in an object store, which one process at a time may change: it holds a lease."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from stoker.errors import ConfigError
from stoker.source.remote.backend import Address
from stoker.source.remote.obstore_backend import Seen, Version, Writer

RENEW = 10.0
"""Seconds between two signs of life."""
EXPIRY = 60.0
"""Seconds without one after which another process takes over."""

_VALID = 0.7  # share of these after which a holder that cannot renew counts itself out
_LOOKS = 5.0  # in the time between two signs of life, of one who waits
_LEAVING = 2.0  # seconds to give it back
_FREE = b"free"
MARKER = ".stoker-packages"
"""Object that marks a prefix as one for packages; nothing is removed from one without it."""
_CONCURRENCY = 4  # packing, loading, and each of them once more while it lingers


class Objects(Protocol):
    """Small objects that are replaced only if they are the expected version; raises OSError."""

    def look(self, key: str) -> Seen | None:
        """Return an object; None if there is none."""
        ...

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        """Write it in place of ``version``, None: if there is none; return its version then.

        None if it is another by now.
        """
        ...


class Lease:
    """The right to use ``key``, held by a process as long as it renews it.

    The holder rewrites the object every ``renew`` seconds, each time with other content, and only
    in place of what it wrote last. A process that wants it watches: when the object has not changed
    for ``expiry`` seconds *of the watcher's own clock*, it replaces exactly that version. The
    holder gives up earlier, from when it *sent* its last sign of life, so that two never hold it at
    once as long as their clocks run equally fast. A process stopped right after :meth:`check` may
    still act once: what it does must be harmless then.

    ``holder`` (hexadecimal digits) names the process, so that one restarted in place of a dead one
    need not wait. One thread calls :meth:`acquire`, any :meth:`check`.
    """

    def __init__(
        self,
        objects: Objects,
        key: str,
        holder: str,
        *,
        renew: float = RENEW,
        expiry: float = EXPIRY,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._objects, self._key, self._holder = objects, key, holder.encode()
        self._renew, self._expiry = renew, expiry
        self._clock, self._sleep = clock, sleep
        self._mine: Seen | None = None
        self._until = 0.0
        self._watched: Seen | None = None
        self._since = 0.0

    @property
    def is_held(self) -> bool:
        """Whether no other process can hold it."""
        return self._mine is not None and self._clock() < self._until

    def check(self) -> None:
        """Raise :class:`BlockingIOError` unless it is held."""
        if not self.is_held:
            raise BlockingIOError(errno.EBUSY, "another job may use it by now", self._key)

    def acquire(self) -> None:
        """Wait until it is held.

        Raises :class:`BlockingIOError` when another process shows that it is in use, and
        :class:`OSError` when the storage fails.
        """
        while not self.try_acquire():
            self._sleep(self._renew / _LOOKS)

    def try_acquire(self) -> bool:
        """Look once, and take it if it is free or has been abandoned; see :meth:`acquire`."""
        seen, now = self._objects.look(self._key), self._clock()
        is_free = seen is None or seen.content == _FREE or seen.content.startswith(self._holder)
        if not is_free and seen != self._watched:
            if self._watched is not None and self._watched.content != _FREE:
                self._watched = None
                raise BlockingIOError(
                    errno.EBUSY,
                    "another job keeps its packages there, give each its own",
                    self._key,
                )
            self._watched, self._since = seen, now
        if is_free or now - self._since >= self._expiry:
            self._watched = None
            return self._write(seen)
        return False

    def renew(self) -> bool:
        """Give a sign of life; False once another process has it. Raises OSError."""
        mine = self._mine
        if mine is None:
            return False
        seen = self._objects.look(self._key)
        # By the content: there are storages that replace whatever is there.
        if seen is not None and seen.content != mine.content:
            self._mine = None
            return False
        return self._write(seen)

    def release(self) -> None:
        """Give it back, if it is held. Raises OSError."""
        mine, self._mine = self._mine, None
        if mine is not None:
            self._objects.replace(self._key, _FREE, mine.version)

    def _write(self, before: Seen | None) -> bool:
        """Replace what was seen with our own sign of life; False if another process was faster."""
        content, sent = self._holder + b" " + secrets.token_hex(8).encode(), self._clock()
        version = self._objects.replace(
            self._key, content, None if before is None else before.version
        )
        if version is None:  # it may have been ours, and the answer was lost
            seen = self._objects.look(self._key)
            if seen is None or seen.content != content:
                self._mine = None
                return False
            version = seen.version
        self._mine, self._until = Seen(content, version), sent + _VALID * self._expiry
        return True


class LeaseKeeper:
    """Keeps a lease that is held alive, in a thread of its own, until it is closed."""

    def __init__(self, lease: Lease, every: float = RENEW) -> None:
        self._lease, self._every = lease, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give it back. A storage that hangs is not waited for. May be called again."""
        self._stop.set()
        self._thread.join(_LEAVING)

    def _run(self) -> None:
        going = True
        while going and not self._stop.wait(self._every):
            with contextlib.suppress(OSError):  # tried again until it is too late
                going = self._lease.renew()
        with contextlib.suppress(OSError):
            self._lease.release()


class ObjectDepot:
    """See :class:`~stoker.bundles.depot.Depot`. Opened in the packaging process only.

    One process at a time uses a ``group`` of names, by a :class:`Lease`,
    for which the storage must know conditional writes; ``holder``, ``renew`` and ``expiry`` are
    those of the lease. One that lost it, and does not know yet, can do no more than store or
    remove packages that the next one finds missing or never looks at: none is named twice.

    Raises :class:`~stoker.errors.ConfigError` where something else lies below the prefix, or the
    address or its options are invalid, and :class:`BlockingIOError` if another process uses it.
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
        self._prefix = address.prefix.rstrip("/") + "/"
        self._where, self._group = address.root + self._prefix, group
        self._writer = Writer(address, _CONCURRENCY)
        self._mark()
        key = f"{self._prefix}.{group}.lease"
        self._lease = Lease(self._writer, key, holder, renew=renew, expiry=expiry)
        self._lease.acquire()
        self._keeper = LeaseKeeper(self._lease, renew)

    def names(self) -> list[str]:
        """Return the packages of this group."""
        self._lease.check()
        begin = self._prefix + self._group + "-"
        found = self._writer.all(begin)
        return sorted(entry.key.decode()[len(self._prefix) :] for entry in found)

    def publish(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Put a package with one request."""
        self._lease.check()
        self._writer.put(self._prefix + name, b"".join(pieces))

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Return a package, or its first bytes, with one request."""
        return self._writer.get(self._prefix + name, 0, num_bytes)

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages."""
        self._lease.check()
        keys = [self._prefix + name for name in names]
        try:
            self._writer.delete(keys)
        except FileNotFoundError:  # some storages say so, and may not have continued
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._writer.delete([key])

    def close(self) -> None:
        """Let others use it."""
        self._keeper.close()

    def _mark(self) -> None:
        first = self._writer.first_page(self._prefix)
        try:
            self._writer.head(self._prefix + MARKER)
        except FileNotFoundError:
            if first:
                key = first[0].key.decode()
                raise ConfigError(
                    f"{self._where} is not empty and not for Stoker's packages (there is {key!r}): "
                    "give a prefix of their own"
                ) from None
            self._writer.put(self._prefix + MARKER, b"stoker\n")
