"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class FIFO(NaturalOrder):
    """Key: the time of insertion; hits change nothing."""

    name: ClassVar[str] = "fifo"

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by insertion."""
        return (Region("main", 1.0, order="insertion"),)
