"""Once an epoch: whatever stays is used again in an epoch's time, so that the cheapest stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.plan import Plan
from stoker.policy.next_use import NextUse

_SHARED = 0.1  # of a mean sample: more samples hit, for few bytes (docs/foresight.md)
_ALONE = 2.0**24  # so that keys from before a job came lose to those of all jobs, in seconds


@dataclass(frozen=True)
class OnceAnEpoch(NextUse):
    """Next use where each sample comes once an epoch: a fixed set, that with the most requests.

    Each cached byte then serves one byte an epoch, whichever it is, and to keep what is used
    soonest in the next epoch gains nothing: its hits come in one run as the epoch begins, during
    which storage idles when the window of prefetch is full. So times count in whole epochs: what
    this one still needs outranks what it does not, and else the key is -size / cost. The smallest
    samples stay, the most in number that the cache can hold, and with ``request_bytes=0`` or equal
    sizes those that came first, as in MinIO (CoorDL, VLDB 2021).

    Where other jobs use the cache too, it is to hold what one of them needs soon, and the keys are
    those of :class:`NextUse`. To keep small samples does cost bytes then, so that a request counts
    as a tenth of a sample of mean size at most. Raises :class:`~stoker.errors.ConfigError` for a
    negative cost.
    """

    name: ClassVar[str] = "once_an_epoch"

    @property
    def shared_request_bytes(self) -> float:
        """What a request costs where other jobs use the cache too, in bytes."""
        mean = 0.0 if self.sizes is None or not len(self.sizes) else float(self.sizes.mean())
        return min(self.request_bytes, _SHARED * mean)

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n]: minus the epoch of the next use, and within it the smallest first."""
        keys = self.keys_after(ids, np.ones(len(ids)))
        keys -= upcoming >= len(plan)
        keys -= _ALONE + plan.epoch
        return keys
