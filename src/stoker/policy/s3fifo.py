"""S3-FIFO: a small queue filters, a main queue keeps, a ghost queue remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.errors import ConfigError
from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class S3FIFO(NaturalOrder):
    """Newcomers enter a small queue; those hit there, or lately evicted from it, enter main.

    Main is a queue in which hit samples go to the back, up to three times. An empty cache fills
    both queues before anything leaves, as the authors' libcachesim does. From Yang et al.,
    "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. A sample larger than the small
    queue is not cached. Raises :class:`~stoker.errors.ConfigError` for shares or visits out of
    range.
    """

    name: ClassVar[str] = "s3fifo"

    small: float = 0.1
    """Share of the small queue, 0 < small < 1; main has the rest."""
    ghost: float = 0.9
    """Bytes whose ids the ghost remembers, as a share of the cache, 0 < ghost <= 1."""
    visits: int = 2
    """Hits in the small queue that promote to main, 1 to 3."""

    def __post_init__(self) -> None:
        if not 0 < self.small < 1:
            raise ConfigError(f"small={self.small} is refused: give a share, 0 < small < 1")
        if not 1 <= self.visits <= 3:
            raise ConfigError(f"visits={self.visits} is refused: give 1, 2 or 3")
        self.regions()

    def regions(self) -> tuple[Region, ...]:
        """Small, main, and a ghost that holds no bytes."""
        return (
            Region(
                "small",
                self.small,
                order="insertion",
                pop="promote",
                visits=self.visits,
                promote_to="main",
                ghost="ghost",
                strict=False,
            ),
            Region("main", 1 - self.small, order="insertion", pop="second_chance", strict=False),
            Region("ghost", self.ghost, order="insertion", holds_bytes=False),
        )
