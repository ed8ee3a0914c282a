"""How fast and how stubbornly a source asks its storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.errors import ConfigError
from stoker.source.retry import Retry


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
