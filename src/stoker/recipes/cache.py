"""What a cache needs besides a policy: the tables of a recipe, and its shares.

The Loader and the simulator both build their caches by this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.node.bandwidth import FetchShare
from stoker.policy.base import Policy
from stoker.policy.shares import Shares
from stoker.recipes.base import Recipe
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.store.claims import Claims
from stoker.store.store import Store
from stoker.store.substitutes import StandIns
from stoker.store.tier import RegionTier


def make_store(
    recipe: Recipe,
    policy: Policy,
    source: Source,
    tier: RegionTier,
    *,
    has_places: bool = False,
    claims: Claims | None = None,
    stand_ins: StandIns | None = None,
    originals: Source | None = None,
    fetch_share: FetchShare | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """Return the store over ``tier``, with what the recipe's places and substitution need.

    ``policy`` is the recipe's, as it was fitted to the job. ``has_places``: there are places even
    if the policy gives none. The other arguments are those of :class:`~stoker.store.Store`.
    """
    num_samples = len(source)
    places = packaged = None
    if has_places or policy.has_places:
        places = SharedArray.create(num_samples, np.uint8, name="stoker-places")
    if recipe.packaging is not None:
        packaged = SharedArray.create(num_samples, np.uint8, name="stoker-packaged")
    return Store(
        source,
        tier,
        places=places,
        substitution=recipe.substitution,
        stand_ins=stand_ins,
        packaged=packaged,
        claims=claims,
        originals=originals,
        fetch_share=fetch_share,
        follows_scores=policy.follows_scores,
        clock=clock,
    )


class Fitted(NamedTuple):
    """A recipe that was told how large its cache is."""

    recipe: Recipe
    """With packages of a size that goes with the cache, if it has any."""
    shares: Shares | None
    """What divides the cache."""
    least_low: int
    """Bytes that the region of packages has at least; 0 where there are none."""


def fit(
    recipe: Recipe, capacity: int, sizes: NDArray[np.int64], *, least_package: int = 0
) -> Fitted:
    """Return ``recipe`` for a cache of ``capacity`` bytes and samples of ``sizes`` (``i64[N]``).

    Its packages have ``least_package`` bytes at least. Raises
    :class:`~stoker.errors.ConfigError` for a cache too small for one.
    """
    packaging, shares = recipe.packaging, recipe.shares
    if packaging is None or not capacity:
        return Fitted(recipe, shares, 0)
    packaging = packaging.fitted(capacity)
    packaging = replace(packaging, min_bytes=max(packaging.min_bytes, least_package))
    recipe = replace(recipe, packaging=packaging)
    if shares is None:
        return Fitted(recipe, shares, 0)
    least = packaging.least_region_bytes(sizes)
    divided = shares.for_cache(capacity, least)
    return Fitted(recipe, shares, 0) if divided is None else Fitted(recipe, divided, least)
