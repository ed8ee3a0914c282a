"""Least recently used leaves first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class LRU(NaturalOrder):
    """Key: the time of the last access."""

    name: ClassVar[str] = "lru"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by recency."""
        return (Region("main", 1.0, order="recency"),)
