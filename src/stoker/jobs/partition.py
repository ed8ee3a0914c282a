"""The memory of one cache, divided among its jobs by weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SegmentError, StokerError
from stoker.node import descriptors
from stoker.node.locks import await_lock
from stoker.policy.base import Region
from stoker.store.arena import Arena
from stoker.store.registry import open_arrays

log = logging.getLogger("stoker")

PARTS = 12
"""Jobs with a part of their own; an arena has 16 regions. Further ones use what has no owner."""
EVERY = 0.5
"""Seconds between two divisions, in which a part that may grow does."""
IDLE = 1.0
"""Seconds without a batch after which a job counts as idle; more, if its batches take long."""
LONGEST_STEP = 5.0
"""Seconds; what takes longer is a pause."""
_GONE = 60.0  # seconds after which another job may have its part
_STEPS = 4  # times the longest step of late without a batch
_PATIENCE = 1.0  # seconds for another job that takes its part
_PART = np.dtype(
    [
        ("token", "u8"),  # of the job; 0: none
        ("weight", "f8"),
        ("seen", "f8"),  # when it got a batch, on the monotonic clock
        ("gap", "f8"),  # seconds between two batches, the longest of late
    ]
)

Floats = NDArray[np.float64]


def fair_shares(weights: Floats, demands: Floats, capacity: float) -> Floats:
    """Return f64[n]: ``capacity`` divided max-min fairly by ``weights`` f64[n], all above 0.

    Each gets its demand, of ``demands`` f64[n], or else as much per weight as any other, and all
    is given out that is wanted. Progressive filling (Bertsekas and Gallager, "Data Networks", 1987,
    6.5.2).
    """
    shares = np.zeros(len(weights))
    hungry, left = demands > 0, capacity
    while hungry.any():
        level = left / weights[hungry].sum()
        full = hungry & (demands <= level * weights)
        if not full.any():
            shares[hungry] = level * weights[hungry]
            return shares
        shares[full] = demands[full]
        left -= float(demands[full].sum())
        hungry &= ~full
    return shares


def are_idle(silent: Floats | float, gaps: Floats | float) -> NDArray[np.bool_]:
    """Return bool[n]: jobs whose last batch was f64[n] seconds ago, after ``gaps`` between two."""
    return np.asarray(silent > np.maximum(IDLE, _STEPS * gaps))


class Partition:
    """One job's part of the memory of a shared cache, a region of its arena.

    The part has its share of the memory by ``weight`` while all jobs want more than they have.
    What a job does not fill the others get, and so all that belongs to one that is idle; when it
    is back its part grows at the cost of those that are over their share. Samples of any part
    are hits for all jobs; each is held by the job that brought it. What jobs without a part bring
    is in the arena's first region, of weight 1. ``key`` names the arena, ``region`` has the rules
    of new parts, ``token`` is the job's. Any of the jobs divides, from a training thread; nothing
    is locked but while a part is taken.

    Raises what :func:`~stoker.store.registry.open_arrays` does, :class:`OSError` where the memory's
    descriptor cannot be reopened, and :class:`~stoker.errors.SegmentError` if other jobs keep it
    locked.
    """

    def __init__(
        self,
        key: str,
        arena: Arena,
        region: Region,
        token: int,
        weight: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena, self._clock = arena, clock
        layout = {"parts": (PARTS * _PART.itemsize, "u1"), "divided": (1, "f8")}
        self._arrays = open_arrays(f"parts {key}", layout)
        self._rows: NDArray[Any] = self._arrays["parts"].array.view(_PART)
        self._divided: Floats = self._arrays["divided"].array  # when a job did so
        self._commons = next(iter(arena.stats()["regions"]))
        self._own: int | None = None
        self.region = self._commons
        """Where the job's samples go."""
        try:
            self._take(region, token, weight)
        except BaseException:
            self.close()
            raise
        self.seen()

    def seen(self) -> None:
        """Note that the job got a batch; divide the memory again, if that was a while ago."""
        now = self._clock()
        if self._own is not None:
            row = self._rows[self._own]
            row["gap"] = max(0.9 * float(row["gap"]), min(now - float(row["seen"]), LONGEST_STEP))
            row["seen"] = now
        if now - self._divided[0] >= EVERY:
            self._divided[0] = now
            try:
                self._divide(now)
            except (StokerError, OSError) as error:
                log.info("the cache is not divided again: %s", error)

    def close(self) -> None:
        """Let go; may be called again. As no more batches are noted, the others use the part."""
        self._arrays.close()

    def _take(self, region: Region, token: int, weight: float) -> None:
        """Take the part of this job's other ranks, or one that is free."""
        lock = descriptors.reopen(self._arrays["parts"].fileno())
        try:
            if not await_lock(lock.fileno(), _PATIENCE, every=0.005):
                raise SegmentError("other jobs are taking their parts of the cache")
            now, rows = self._clock(), self._rows
            own = np.flatnonzero(rows["token"] == token)
            free = np.flatnonzero((rows["token"] == 0) | (now - rows["seen"] > _GONE))
            if not own.size and not free.size:
                log.info("%d jobs have parts of this cache: this one uses the rest", PARTS)
                return
            number = int(own[0] if own.size else free[0])
            rows[number] = token, weight, now, 0.0
            name = _name(number)
            if name not in self._arena.stats()["regions"]:
                rules = {k: v for k, v in vars(replace(region, name=name)).items() if k != "share"}
                self._arena.add_region(rules.pop("name"), 0, **rules)
            self._own, self.region = number, name
            self._divided[0] = -np.inf  # at once
        finally:
            descriptors.drop(lock)

    def _divide(self, now: float) -> None:
        regions = self._arena.stats()["regions"]
        parts = [number for number in range(PARTS) if _name(number) in regions]
        names = [self._commons, *map(_name, parts)]
        rows = self._rows[parts]
        held = np.array([float(regions[name]["bytes"]) for name in names])
        budgets = np.array([float(regions[name]["budget"]) for name in names])
        idle = np.concatenate([[False], are_idle(now - rows["seen"], rows["gap"])])
        weights = np.where(idle, 1.0, np.concatenate([[1.0], rows["weight"]]))
        whole = float(budgets.sum())
        shares = fair_shares(weights, np.where(idle, 0.0, _demands(held, budgets)), whole)
        # Nothing of an idle job's is evicted before its memory is needed.
        shares += fair_shares(weights, np.where(idle, held, 0.0), whole - float(shares.sum()))
        shares += (whole - float(shares.sum())) * (weights / weights.sum())
        self._arena.divide(dict(zip(names, shares.tolist(), strict=True)))


def _demands(held: Floats, budgets: Floats) -> Floats:
    """Return f64[n], the bytes that parts could use soon: much more, if they are full.

    The first is what no job owns: it has a hundredth at least, or would never be used.
    """
    whole = float(budgets.sum())
    is_full = held >= 0.9 * budgets
    demands = np.where(is_full, 2 * held + 0.1 * whole, 1.1 * held + 0.02 * whole)
    demands[0] = max(0.01 * whole, 1.5 * held[0])
    return np.asarray(demands)


def _name(number: int) -> str:
    return f"job {number}"
