"""How long the training loop waited for batches, as counts in buckets that double."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WAIT_SECONDS: tuple[float, ...] = tuple(1e-4 * 2**power for power in range(20))
"""Upper ends of the buckets, 0.1 ms to 52 s; one more bucket has what is longer."""


class Waits:
    """Counts of waits by length. Not thread-safe."""

    def __init__(self) -> None:
        self.counts = [0] * (len(WAIT_SECONDS) + 1)
        """Waits in each bucket."""

    def add(self, seconds: float) -> None:
        """Count a wait."""
        self.counts[bisect_left(WAIT_SECONDS, seconds)] += 1


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds that ``share`` (0 to 1) of the waits did not exceed; 0 without waits.

    Between the ends of a bucket it is interpolated, as Prometheus does; what is longer than the
    last bucket counts as its end.
    """
    left = share * sum(counts)
    low = 0.0
    for high, count in zip(WAIT_SECONDS, counts, strict=False):
        if left <= count and count:
            return low + (high - low) * left / count
        left, low = left - count, high
    return low if any(counts) else 0.0
