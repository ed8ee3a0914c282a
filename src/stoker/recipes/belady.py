"""Belady: the plan is known, so the sample needed latest leaves."""

from __future__ import annotations

from stoker.policy.next_use import NextUse
from stoker.recipes.base import Recipe
from stoker.recipes.minio import hit_ratio


def belady(request_bytes: float = 0.0) -> Recipe:
    """Return uniform sampling over a cache that evicts by next use, from the seeded plan.

    The plan reaches one epoch ahead. In bytes no policy hits more than the cache's share when
    each sample is visited once an epoch; ``request_bytes``, the cost of a request beside its
    bytes (latency x bandwidth), keeps small samples instead and so hits more in number. Source:
    NoPFS (SC 2021); Belady, IBM Systems Journal 5 (1966).
    """
    description = "uniform; the sample needed latest leaves, by the plan"
    return Recipe("belady", description, NextUse(request_bytes), limit=hit_ratio)
