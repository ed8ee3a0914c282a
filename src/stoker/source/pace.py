"""How fast and how persistently a source sends requests to its storage."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from stoker.errors import ConfigError


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
