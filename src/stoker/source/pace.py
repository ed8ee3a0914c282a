"""How fast and how persistently a source sends requests to its storage."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import random
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import ConfigError, UntrustedPath
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir, runtime_dir

_FORM = "=dd"
_BURST = 0.05  # seconds: what may come at once after a pause
# Further ahead than this is not a queue but what the clock of an earlier boot has left behind.
_LONGEST_QUEUE = 3600.0


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with full jitter, up to a deadline.

    Before attempt ``n + 1`` a request waits a random time between 0 and
    ``min(longest, first * 2 ** (n - 1))`` seconds, so that requests that failed together are not
    repeated together (Brooker, "Exponential Backoff and Jitter", AWS 2015). If the storage
    throttles (429, 503, ``SlowDown``), it waits ``throttled`` times that.

    A request is given up ``deadline`` seconds after its first attempt, or after ``attempts`` of
    them. An outage costs the deadline once, not per sample, call or process: it begins with the
    first failure after which nothing is read, and ``deadline`` seconds later every request still
    waiting is tried once more and then given up too. A call that begins later, while the storage
    still fails, gets ``unanswered`` seconds. The same limit applies where nothing has ever answered
    (connections refused, an unknown host): that is more often a wrong address than an outage.

    An outage is reported once in each process that reads, as a warning of the logger ``stoker``.

    Raises :class:`ConfigError` for values that are negative, zero where that is invalid, or
    not numbers.
    """

    deadline: float = 120.0
    """Seconds."""
    unanswered: float = 5.0
    """Seconds to try where nothing has ever answered; at most ``deadline``."""
    attempts: int | None = None
    """Maximum number of requests for one sample; None: only the deadline limits it."""
    first: float = 0.1
    """Seconds: the longest first wait."""
    longest: float = 10.0
    """Seconds: the longest of all waits."""
    throttled: float = 4.0
    """How many times longer to wait when the storage throttles."""

    def __post_init__(self) -> None:
        for name in ("deadline", "unanswered", "first", "longest", "throttled"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} is not possible: give 0 or more")
        if self.attempts is not None and self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts} is not possible: give 1 or more, or None")

    def wait(self, failures: int, throttled: bool, draw: random.Random) -> float:
        """Return how many seconds to wait after ``failures`` failures (1 or more)."""
        # The exponent is bounded because a float is.
        bound = min(self.longest, self.first * 2.0 ** min(failures - 1, 60))
        return draw.uniform(0.0, bound * (self.throttled if throttled else 1.0))

    def is_over(self, failures: int, elapsed: float) -> bool:
        """Return whether to give up after so many failures and seconds."""
        return elapsed >= self.deadline or (self.attempts is not None and failures >= self.attempts)


@dataclass(frozen=True)
class Pace:
    """Concurrency, retries, second requests and limits of one source.

    Raises :class:`ConfigError` for values out of range.
    """

    concurrency: int = 64
    """Requests under way at once, in each process that reads."""
    retry: Retry = field(default_factory=Retry)
    """What to do about requests that fail."""
    hedge: float | None = None
    """Send a second request for a read that takes longer than this quantile of the recent ones
    (0.99: the slowest percentile), and use what comes first. None never does."""
    requests_per_second: float | None = None
    """Limit that all processes of this user on this node share for this bucket or host."""
    bytes_per_second: float | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 1024:
            raise ConfigError(f"concurrency={self.concurrency} is out of range: give 1 to 1024")
        if self.hedge is not None and not 0 < self.hedge < 1:
            raise ConfigError(f"hedge={self.hedge} is not a quantile: give one like 0.99, or None")
        for name in ("requests_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is not possible: give more than 0, or None")

    @property
    def is_plain(self) -> bool:
        """Whether requests are neither limited nor counted, nor sent a second time."""
        limits = (self.requests_per_second, self.bytes_per_second, self.retry.attempts)
        return self.hedge is None and not any(limits)


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
        except UntrustedPath:
            raise
        except OSError as error:
            raise ConfigError(f"the rate limit needs the file {self.path}: {error}") from error


def _later(free_at: float, now: float, seconds: float) -> float:
    """Return until when a limit is used up after another use of ``seconds``."""
    if free_at > now + _LONGEST_QUEUE:
        free_at = now
    return max(free_at, now - _BURST) + seconds
