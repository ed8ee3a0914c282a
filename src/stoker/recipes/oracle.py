"""Oracle: every access hits."""

from __future__ import annotations

from stoker.policy.minio import MinIO
from stoker.recipes.base import Recipe


def oracle() -> Recipe:
    """Return uniform sampling over a cache of the whole data set, filled before training begins.

    The upper bound of what any cache can give, to compare the others with: the size that the
    user gives the cache does not count, and the memory for all samples must be there. Source:
    the usual yardstick, "Oracle" in iCache (HPCA 2023).
    """
    description = "uniform; everything is cached beforehand: the upper bound"
    return Recipe("oracle", description, MinIO(), limit=hit_ratio, preload=True)


def hit_ratio(cache_fraction: float) -> float:
    """Return 1, whatever the size asked for: the whole data set is cached."""
    return 1.0
