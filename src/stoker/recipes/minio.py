"""MinIO: what came first stays."""

from __future__ import annotations

from stoker.policy.minio import MinIO
from stoker.recipes.base import Recipe


def minio() -> Recipe:
    """Return uniform sampling over a static cache that is filled once and never replaced.

    Every cached byte hits once an epoch, which no policy exceeds when each sample is visited
    once an epoch. The best plain choice for ordinary training. Source: Mohan et al.,
    "Analyzing and Mitigating Data Stalls in DNN Training" (CoorDL), VLDB 2021.
    """
    return Recipe("minio", "uniform; the first to come stay for good", MinIO(), limit=hit_ratio)


def hit_ratio(cache_fraction: float) -> float:
    """Return the hit ratio from the second epoch on: the cached share itself."""
    return cache_fraction
