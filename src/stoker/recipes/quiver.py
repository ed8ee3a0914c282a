"""Quiver: any cached sample will do, as long as it was not served in this epoch."""

from __future__ import annotations

from stoker.policy.minio import MinIO
from stoker.policy.substitution import Substitution
from stoker.recipes.base import Recipe


def quiver() -> Recipe:
    """Return uniform epochs whose order bends to what is cached.

    A sample that is not cached is replaced by one that is and was not served yet in this epoch,
    and gets a turn later, when no such sample is left. So each sample is served once an epoch, as
    without, and the cache is used up first: its hits are for the most part substitutions, and
    both together are what a static cache hits. The cache keeps what came first. Source: Kumar and
    Sivathanu, "Quiver: An Informed Storage Cache for Deep Learning", FAST 2020, section 3.
    """
    return Recipe(
        "quiver",
        "uniform; any cached sample stands in for a missing one",
        policy=MinIO(),
        substitution=Substitution("any", "main"),
    )
