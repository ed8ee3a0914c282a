"""Random: any sample may leave."""

from __future__ import annotations

import math

from stoker.policy.random import Random
from stoker.recipes.base import Recipe


def random() -> Recipe:
    """Return uniform sampling over a cache that evicts a random sample.

    Keeps no order at all, so it cannot be fooled by one; between LRU and MinIO under shuffled
    epochs. A baseline. Source: the usual null hypothesis of caching studies.
    """
    return Recipe("random", "uniform; a random one leaves", Random(), limit=hit_ratio)


def hit_ratio(cache_fraction: float) -> float:
    """Return the hit ratio when each epoch is a fresh shuffle: -c ln(1 - c + c e^(-1/c)).

    With M(t) misses per sample up to time t of an epoch, a copy survives a stretch of misses
    with e^(-M/c). Solving M' = 1 - A e^(-M/c), A the chance to survive from the last visit to
    the end of the epoch, gives A = c and M(1) = c ln(c + (1 - c) e^(1/c)).
    """
    if cache_fraction <= 0:
        return 0.0
    return -cache_fraction * math.log1p(cache_fraction * math.expm1(-1 / cache_fraction))
