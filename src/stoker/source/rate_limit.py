"""A limit on requests and bytes per second that all of a user's processes on a node share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import ConfigError, UntrustedPlace
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir, runtime_dir

_FORM = "=dd"
_BURST = 0.05  # seconds: what may come at once after a pause
# Further ahead than this is not a queue but what the clock of an earlier boot has left behind.
_LONGEST_QUEUE = 3600.0


@dataclass(frozen=True)
class RateLimit:
    """At most this many requests and bytes per second, for all readers of ``name``.

    Every process of this user on this node that limits the same ``name`` waits in the same
    queue, however it was started. What they share is a file of 16 bytes in the user's runtime
    directory: until when each limit is used up, on the monotonic clock. Processes that
    were given different limits share the queue too, each advancing it at its own rate.

    Picklable, thread-safe and fork-safe: nothing is held open. A process that is killed leaves
    nothing locked. Where the file cannot be used (not ours, not writable) :meth:`take` raises
    :class:`ConfigError`.
    """

    name: str
    """What is limited, like ``s3://bucket``."""
    requests: float | None = None
    """Requests per second; None is unlimited."""
    num_bytes: float | None = None
    """Bytes per second; None is unlimited."""
    path: Path = field(init=False)
    """The file that is shared."""

    def __post_init__(self) -> None:
        for what in ("requests", "num_bytes"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{what}={value} per second is not possible: give more than 0")
        digest = hashlib.blake2b(self.name.encode(), digest_size=12).hexdigest()
        object.__setattr__(self, "path", runtime_dir() / f"rate-{digest}")

    def take(self, num_bytes: int) -> float:
        """Join the queue with one request for so many bytes; return the seconds to wait."""
        now = time.monotonic()
        fd = self._open()
        try:
            # Another thread's descriptor is another lock holder too, so this excludes threads.
            fcntl.flock(fd, fcntl.LOCK_EX)
            stored = os.pread(fd, struct.calcsize(_FORM), 0)
            free_at = struct.unpack(_FORM, stored) if len(stored) == 16 else (0.0, 0.0)
            after = (
                _later(free_at[0], now, 1 / self.requests if self.requests else 0.0),
                _later(free_at[1], now, num_bytes / self.num_bytes if self.num_bytes else 0.0),
            )
            os.pwrite(fd, struct.pack(_FORM, *after), 0)
        finally:
            os.close(fd)
        return max(0.0, *(end - now for end in after))

    def wait(self, num_bytes: int, stop: threading.Event) -> None:
        """Wait for the turn of a request for ``num_bytes``, or until ``stop`` is set."""
        seconds = self.take(num_bytes)
        if seconds > 0:
            stop.wait(seconds)

    def _open(self) -> int:
        try:
            if not self.path.parent.is_dir():
                prepare_runtime_dir()
            return open_file(self.path, os.O_RDWR | os.O_CREAT)
        except UntrustedPlace:
            raise
        except OSError as error:
            raise ConfigError(f"the rate limit needs the file {self.path}: {error}") from error


def _later(free_at: float, now: float, seconds: float) -> float:
    """Return until when a limit is used up after another use of ``seconds``."""
    if free_at > now + _LONGEST_QUEUE:
        free_at = now
    return max(free_at, now - _BURST) + seconds
