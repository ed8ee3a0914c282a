"""What a job wants of the other jobs that share its cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.errors import ConfigError

LONGEST_NAME = 64
"""Bytes of a job's name in UTF-8."""


@dataclass(frozen=True)
class Sharing:
    """How a job shares the cache of its data set with other jobs of this node.

    Raises :class:`~stoker.errors.ConfigError` for values out of range.
    """

    name: str = ""
    """The job's name in ``stoker ls``; by default its recipe and process."""
    merge: bool = True
    """Whether samples are kept for all jobs together; False: each job writes its own keys."""
    probe: int = 0
    """Batches without the cache, and as many with it, by which the gain is measured at the start of
    each epoch, fewer where it is short; nothing is read ahead meanwhile. iCache uses 20. 0: it is
    estimated from what is measured anyway."""
    eligible_from: float = 1.5
    """Gain from which the scores of a job count, 1 or more (iCache, HPCA 2023)."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"name={self.name!r} is invalid: give text of at most {LONGEST_NAME} bytes"
            )
        if isinstance(self.probe, bool) or not isinstance(self.probe, int) or self.probe < 0:
            raise ConfigError(f"probe={self.probe!r} is invalid: give a number of batches, 0 or up")
        if self.probe == 1:
            raise ConfigError("probe=1 is invalid: give 2 batches or more, or 0 for none")
        if not (math.isfinite(self.eligible_from) and self.eligible_from >= 1):
            raise ConfigError(f"eligible_from={self.eligible_from!r} is invalid: give 1 or more")
