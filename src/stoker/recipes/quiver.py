"""Quiver: any cached sample will do, as long as it was not served in this epoch."""

from __future__ import annotations

from stoker.policy.minio import MinIO
from stoker.policy.substitution import Substitution
from stoker.recipes.base import Recipe


def quiver() -> Recipe:
    """Return uniform epochs in which any cached sample may stand in for a missing one.

    A sample that is not cached is replaced by one that is and was not served yet in this epoch;
    only when none is left is it read. The cache keeps what came first. So the beginning of an
    epoch is served from the cache, whatever was asked for, and samples that stay outside are
    visited less often: hits here are substitutions, and counted as such. Source: Kumar and
    Sivathanu, "Quiver: An Informed Storage Cache for Deep Learning", FAST 2020, section 3.
    """
    return Recipe(
        "quiver",
        "uniform; any cached sample stands in for a missing one",
        policy=MinIO(),
        substitution=Substitution("any", "main"),
    )
