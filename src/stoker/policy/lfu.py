"""Least frequently used leaves first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class LFU(NaturalOrder):
    """Key: the count of accesses while cached; among equals the least recently used leaves.

    This is in-cache LFU: an evicted sample that comes back starts at one again.
    """

    name: ClassVar[str] = "lfu"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by frequency."""
        return (Region("main", 1.0, order="frequency"),)
