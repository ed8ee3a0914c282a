"""S3-FIFO: newcomers prove themselves in a small queue first."""

from __future__ import annotations

from stoker.policy.s3fifo import S3FIFO
from stoker.recipes.base import Recipe


def s3fifo(small: float = 0.1, ghost: float = 0.9, visits: int = 2) -> Recipe:
    """Return uniform sampling over an S3-FIFO cache; parameters as in :class:`S3FIFO`.

    Samples visited while on probation, or remembered from a recent eviction, enter the main
    queue; one-hit wonders leave quickly. Of use when the sampler favours some samples.
    Source: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
    Raises :class:`~stoker.errors.ConfigError` for shares or visits out of range.
    """
    policy = S3FIFO(small=small, ghost=ghost, visits=visits)
    return Recipe("s3fifo", "uniform; a small queue before the main one", policy)
