"""The static cache of CoorDL: what came first stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.policy.base import NaturalOrder, Region


@dataclass(frozen=True)
class MinIO(NaturalOrder):
    """Samples enter while there is room, and none leaves.

    Under uniform sampling, each sample once an epoch, its byte hit ratio is the share of the data
    set's bytes that fit, which no policy beats (Mohan et al., "Analyzing and Mitigating Data
    Stalls in DNN Training", VLDB 2021).
    """

    name: ClassVar[str] = "minio"

    def regions(self) -> tuple[Region, ...]:
        """One region that never evicts."""
        return (Region("main", 1.0, order="insertion", admission="while_room"),)
