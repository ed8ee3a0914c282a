"""What measured rates mean for training: which of them binds, the stall, the cache that removes it.

An epoch of N samples, each visited once, with a share c of the bytes cached, takes at least

    T(c) = N max(1 / X_compute,  m / X_storage,  1 / X_decode),    m = 1 - c,

with rates in samples a second. No order and no policy has fewer misses than m = 1 - c when each
sample is visited once an epoch, and the static cache has no more. Storage does not slow training
once m <= m* = X_storage / min(X_compute, X_decode), hence from c* = 1 - m* on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What was measured or given, each in samples a second; None where it is not known."""

    storage: float
    """The most that the storage delivered."""
    decode: float | None = None
    """All processors together."""
    compute: float | None = None
    """Training from memory."""

    @property
    def demand(self) -> float | None:
        """The rate at which samples would be consumed with unlimited storage."""
        known = [rate for rate in (self.compute, self.decode) if rate is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Epoch:
    """Lower bounds on one epoch."""

    cached: float
    """Share of the bytes that is cached, 0 to 1."""
    seconds: float
    """The least that it takes."""
    stall_seconds: float | None
    """Of these, those in which training waits; None where its rate is not known."""

    @property
    def stall_share(self) -> float | None:
        """Share of the epoch in which training waits."""
        if self.stall_seconds is None:
            return None
        return self.stall_seconds / self.seconds if self.seconds else 0.0


def bound_by(rates: Rates, cached: float = 0.0) -> str:
    """Return what limits an epoch: ``"storage"``, ``"decode"`` or ``"compute"``.

    Where two are equal, the one that more cache does not help.
    """
    costs = _costs(rates, cached)
    return max(costs, key=lambda name: costs[name])


def epoch(rates: Rates, num_samples: int, cached: float) -> Epoch:
    """Return the bounds of an epoch with a share ``cached`` of the bytes in the cache."""
    seconds = num_samples * max(_costs(rates, cached).values())
    if rates.compute is None:
        return Epoch(cached, seconds, None)
    return Epoch(cached, seconds, seconds - num_samples / rates.compute)


def largest_miss_ratio(rates: Rates) -> float | None:
    """Return m*, the largest miss ratio at which storage does not slow training, at most 1.

    None where neither the rate of training nor that of decoding is known.
    """
    demand = rates.demand
    return None if demand is None else min(1.0, rates.storage / demand)


def smallest_cache(rates: Rates) -> float | None:
    """Return c* = 1 - m*, the smallest cached share of bytes for which storage is fast enough."""
    allowed = largest_miss_ratio(rates)
    return None if allowed is None else 1.0 - allowed


def rate_fed(storage: float, cached: float) -> float:
    """Return the samples a second that storage and a cache of that share can feed; may be inf."""
    return math.inf if cached >= 1 else storage / (1 - cached)


def workers_for(rate: float, decode_seconds: float, cores: int) -> int:
    """Return how many workers decode ``rate`` samples a second; a fifth more than just enough."""
    return max(1, min(cores, math.ceil(1.2 * rate * decode_seconds)))


def _costs(rates: Rates, cached: float) -> dict[str, float]:
    """Return the least seconds per sample by what takes them, what cannot be avoided first."""
    known = {"compute": rates.compute, "decode": rates.decode}
    costs = {name: 1 / rate for name, rate in known.items() if rate is not None}
    return costs | {"storage": (1 - min(1.0, cached)) / rates.storage}
