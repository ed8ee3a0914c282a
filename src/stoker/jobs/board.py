"""What jobs write about themselves, for each other to read: rows of shared arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.store.shared_arrays import Layout

SLOTS = 32
"""Processes that share one cache and are known to each other; more of them go without."""

_IDLE = 30.0  # seconds without an access after which a job counts as slower


class Kind(IntEnum):
    """What the keys of a cache mean."""

    NONE = 0
    """The cache's own order, or what only one policy understands: nothing is merged."""
    TIME = 1
    """When samples are needed next."""
    SCORE = 2
    """What they are worth."""


JOB = np.dtype(
    [
        ("token", "u8"),  # of the job, its ranks have the same; 0: nobody
        ("kind", "i8"),
        ("since", "f8"),  # when it came
        ("pid", "i8"),
        ("noted", "f8"),  # when the position was written
        ("position", "i8"),  # accesses of the whole job so far
        ("rate", "f8"),  # accesses per second
        ("period", "f8"),  # accesses in an epoch
        ("gain", "f8"),  # iCache's benefit: time without the cache / time with it
        ("threshold", "f8"),  # gain from which its scores count
        ("request_bytes", "f8"),  # what it takes a request to cost beside its bytes
        ("is_probed", "i8"),
        ("fetch_seconds", "f8"),  # per batch, if all of it came from the source
        ("compute_seconds", "f8"),  # per batch
        ("accesses", "i8"),
        ("hits", "i8"),
        ("fetched", "i8"),
        ("bytes_from_source", "i8"),
        ("name", "S64"),
    ]
)
"""One job, or one rank of it. Times are of the monotonic clock, which all processes share."""

HEAD = np.dtype([("kind", "i8"), ("base", "f8")])
"""Kind of the keys in the cache, and the time that weighted keys count from."""


def layout(num_samples: int) -> Layout:
    """Return the arrays of a board; pages that nobody writes take no memory."""
    return {
        "head": (HEAD.itemsize, "u1"),
        "jobs": (SLOTS * JOB.itemsize, "u1"),
        "next_use": (SLOTS * num_samples, "u4"),
        "value": (SLOTS * num_samples, "f4"),
    }


class Board:
    """The rows of all jobs that share a cache.

    ``live`` returns bool[SLOTS], the rows whose process lives; ``clock`` seconds. The arrays are
    those of :func:`layout`; see :meth:`of_its_own` for jobs in one process. Each field has one
    writer, so nobody needs a lock, and what is read while it is written costs a worse key at most.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        live: Callable[[], NDArray[np.bool_]],
        clock: Callable[[], float],
    ) -> None:
        self.head = arrays["head"].view(HEAD)[0:1]
        self.jobs = arrays["jobs"].view(JOB)
        self.next_use: NDArray[np.uint32] = arrays["next_use"].reshape(SLOTS, -1)
        """u32[SLOTS, N]: the access by which a job uses a sample next, modulo 2**32."""
        self.value: NDArray[np.float32] = arrays["value"].reshape(SLOTS, -1)
        """f32[SLOTS, N]: percentile of a sample within a job, in (0, 1]; 0: not seen."""
        self.live = live
        self.clock = clock
        self._owned = b"", np.empty(0, np.int64)  # who was there, and the slots found then

    @classmethod
    def of_its_own(cls, num_samples: int, clock: Callable[[], float]) -> Board:
        """Return a board in this process's memory, whose jobs live from :meth:`enter` on."""
        plain = {name: np.zeros(size, dtype) for name, (size, dtype) in layout(num_samples).items()}
        return cls(plain, lambda: plain["jobs"].view(JOB)["token"] > 0, clock)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.next_use[0])

    @property
    def kind(self) -> Kind:
        """What the keys in the cache mean."""
        return Kind(int(self.head["kind"][0]))

    def enter(
        self, slot: int, token: int, kind: Kind, name: str, pid: int, threshold: float
    ) -> None:
        """Make ``slot`` a new job's; where it is the only one, its kind of keys holds."""
        others = self.live()
        others[slot] = False
        if not others.any():
            self.head["kind"], self.head["base"] = kind, self.clock()
        if self.kind is Kind.SCORE:  # pages that nobody needs are not touched
            self.value[slot] = 0
        row = np.zeros((), JOB)
        row["token"], row["kind"], row["pid"] = token, self.kind, pid
        row["gain"], row["threshold"], row["name"] = (
            1.0,
            threshold,
            name.encode()[: JOB["name"].itemsize],
        )
        row["since"] = self.clock()
        self.jobs[slot] = row

    def leave(self, slot: int) -> None:
        """Take a job out."""
        self.jobs[slot] = np.zeros((), JOB)

    def owners(self) -> NDArray[np.int64]:
        """Return the slots i64[J] of live jobs, of each its oldest. The oldest job comes first."""
        tokens = np.where(self.live(), self.jobs["token"], 0)
        there = tokens.tobytes() + self.jobs["since"].tobytes()
        if there != self._owned[0]:  # asked for several times a batch, and jobs seldom change
            slots = np.flatnonzero(tokens)
            slots = slots[np.lexsort((slots, self.jobs["since"][slots]))]
            _, first = np.unique(tokens[slots], return_index=True)
            slots = slots[np.sort(first)]
            slots.flags.writeable = False
            self._owned = there, slots
        return self._owned[1]

    def positions(self, slots: NDArray[np.int64], ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return i64[J, n]: the accesses by which jobs use ``ids`` next, not modulo anything."""
        now = self.jobs["position"][slots][:, None]
        ahead = self.next_use[slots][:, ids] - now.astype(np.uint32)
        return np.asarray(now + ahead.view(np.int32))

    def rates(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return f64[J], accesses per second; less for a job that has long been idle."""
        idle = np.maximum(self.clock() - self.jobs["noted"][slots], _IDLE)
        return np.asarray(self.jobs["rate"][slots] * _IDLE / idle)
