"""Once an epoch: whatever stays is used again in an epoch's time, so that the cheapest stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.plan import Plan
from stoker.policy.next_use import NextUse
from stoker.scores import Scores


@dataclass(frozen=True)
class OnceAnEpoch(NextUse):
    """Next use where each sample comes once an epoch: a fixed set, that with the most requests.

    Each cached byte then serves one byte an epoch, whichever it is, and changing the set gains
    nothing: its hits come in one run at the begin of an epoch, during which storage idles when
    the window of prefetch is full. So the time to next use counts as the same for all, and the key
    is -size / cost: the smallest samples stay, the most in number that the cache can hold, and
    with ``request_bytes=0`` or equal sizes those that came first, as in MinIO (CoorDL, VLDB 2021).

    Where other jobs use the cache too, it is to hold what one of them needs soon, and the keys are
    those of :class:`NextUse`. Raises :class:`~stoker.errors.ConfigError` for a negative cost.
    """

    name: ClassVar[str] = "once_an_epoch"

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n], the same at all times."""
        return self.keys_after(ids, np.ones(len(ids)))

    def keys_alone(
        self, ids: NDArray[np.uint32], times: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return :meth:`keys`, whatever the times."""
        return self.keys_after(ids, np.ones(len(ids)))
