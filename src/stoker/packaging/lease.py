"""A lease on a place in an object store: one process at a time, without comparing clocks."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

Version = dict[str, str]
"""What tells one version of an object from others, as the storage says."""

RENEW = 10.0
"""Seconds between two signs of life."""
EXPIRY = 60.0
"""Seconds without one after which another process takes over."""

_VALID = 0.7  # share of these after which a holder that cannot renew counts itself out
_LOOKS = 5.0  # in the time between two signs of life, of one who waits
_LEAVING = 2.0  # seconds to give it back
_FREE = b"free"


class Seen(NamedTuple):
    """An object as it was read."""

    content: bytes
    version: Version


class Objects(Protocol):
    """Small objects that are replaced only if they are what one thinks; raises OSError."""

    def look(self, key: str) -> Seen | None:
        """Return an object; None if there is none."""
        ...

    def replace(self, key: str, content: bytes, version: Version | None) -> Version | None:
        """Write it in place of ``version``, None: if there is none; return its version then.

        None if it is another by now.
        """
        ...


class Lease:
    """The right to use what goes by ``key``, held by a process as long as it says so.

    The holder writes the object anew every ``renew`` seconds, each time with another content, and
    only in place of what it wrote last. Who wants it watches: when the object has not changed for
    ``expiry`` seconds *of the watcher's own clock*, it replaces exactly that version. The holder
    counts itself out earlier, from when it *sent* its last sign of life, so that two never hold it
    at once as long as their clocks run equally fast. A process stopped right after :meth:`check`
    may still act once: what it does must be harmless then.

    ``holder`` (hexadecimal digits) names who asks, so that a process started again in place of one
    that died need not wait. One thread calls :meth:`acquire`, any :meth:`check`.
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
        """Whether nobody else can have it."""
        return self._mine is not None and self._clock() < self._until

    def check(self) -> None:
        """Raise :class:`BlockingIOError` unless it is held."""
        if not self.is_held:
            raise BlockingIOError(errno.EBUSY, "another job may use it by now", self._key)

    def acquire(self) -> None:
        """Wait until it is held.

        Raises :class:`BlockingIOError` when somebody else shows that it is in use, and
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
        """Give a sign of life; False once somebody else has it. Raises OSError."""
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
        """Replace what was seen by a sign of life of our own; False if somebody else was faster."""
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


class Keeper:
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
