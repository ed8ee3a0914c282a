"""SIEVE: a queue with a hand that spares visited samples once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


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
