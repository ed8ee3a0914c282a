"""The usual baselines, a few lines each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.errors import ConfigError
from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class FIFO(NaturalOrder):
    """Key: the time of insertion; hits change nothing."""

    name: ClassVar[str] = "fifo"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by insertion."""
        return (Region("main", 1.0, order="insertion"),)


@dataclass(frozen=True)
class LFU(NaturalOrder):
    """Key: the count of accesses while cached; ties evict the least recently used.

    This is in-cache LFU: an evicted sample that comes back starts at one again.
    """

    name: ClassVar[str] = "lfu"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by frequency."""
        return (Region("main", 1.0, order="frequency"),)


@dataclass(frozen=True)
class LRU(NaturalOrder):
    """Key: the time of the last access."""

    name: ClassVar[str] = "lru"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by recency."""
        return (Region("main", 1.0, order="recency"),)


@dataclass(frozen=True)
class MinIO(NaturalOrder):
    """Samples enter while there is room, and none is evicted.

    Under uniform sampling, each sample once an epoch, its byte hit ratio is the share of the data
    set's bytes that fit, which no policy beats (Mohan et al., "Analyzing and Mitigating Data
    Stalls in DNN Training", VLDB 2021).
    """

    name: ClassVar[str] = "minio"

    def regions(self) -> tuple[Region, ...]:
        """One region that never evicts."""
        return (Region("main", 1.0, order="insertion", admission="while_room"),)


@dataclass(frozen=True)
class Random(NaturalOrder):
    """The victim is drawn uniformly by the arena's own seeded generator."""

    name: ClassVar[str] = "random"

    def regions(self) -> tuple[Region, ...]:
        """One region with random victims."""
        return (Region("main", 1.0, order="insertion", pop="random"),)


@dataclass(frozen=True)
class S3FIFO(NaturalOrder):
    """Newcomers enter a small queue; those hit there, or lately evicted from it, enter main.

    Main is a queue in which hit samples go to the back, up to three times. An empty cache fills
    both queues before anything is evicted, as the authors' libcachesim does. From Yang et al.,
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
            raise ConfigError(f"small={self.small} is out of range: give a share, 0 < small < 1")
        if not 1 <= self.visits <= 3:
            raise ConfigError(f"visits={self.visits} is out of range: give 1, 2 or 3")
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


@dataclass(frozen=True)
class Sieve(NaturalOrder):
    """Samples stay where they were inserted; a hand moves from the oldest to the newest.

    A hit sets one bit. The hand clears the bit of those that have it and evicts the first that
    does not; after the newest it starts again at the oldest (Zhang et al., "SIEVE is Simpler than
    LRU", NSDI 2024). Here: keys are (pass of the hand, insertion).
    """

    name: ClassVar[str] = "sieve"

    def regions(self) -> tuple[Region, ...]:
        """One region with the SIEVE pop rule."""
        return (Region("main", 1.0, order="insertion", pop="sieve"),)
