"""CoorDL: what came first stays, as in MinIO."""

from __future__ import annotations

from stoker.policy.minio import MinIO
from stoker.recipes.base import Recipe
from stoker.recipes.minio import hit_ratio


def coordl() -> Recipe:
    """Return uniform sampling over CoorDL's cache, which is MinIO.

    The name under which papers compare with it. What CoorDL adds for several ranks and jobs of
    one node, that each sample is fetched once and kept once, every recipe of Stoker has. Source:
    Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, section 5.
    """
    description = "uniform; the first to come stay for good (MinIO)"
    return Recipe("coordl", description, MinIO(), limit=hit_ratio)
