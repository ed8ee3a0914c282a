"""A uniformly random sample leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class Random(NaturalOrder):
    """The victim is drawn uniformly by the arena's own seeded generator."""

    name: ClassVar[str] = "random"

    def regions(self) -> tuple[Region, ...]:
        """One region with random victims."""
        return (Region("main", 1.0, order="insertion", pop="random"),)
