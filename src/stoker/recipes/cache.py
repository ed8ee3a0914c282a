"""What a cache needs besides a policy: the tables of a recipe, its shares, and keys that follow.

The Loader and the simulator both build their caches by this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stoker.importance.base import Neighbours
from stoker.plan import Plan
from stoker.policy.base import Policy
from stoker.policy.shares import Shares
from stoker.recipes.base import Recipe
from stoker.scores import Scores
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.store.claims import Claims
from stoker.store.store import Store
from stoker.store.substitutes import StandIns
from stoker.store.tier import Ids, RegionTier


def make_store(
    recipe: Recipe,
    policy: Policy,
    source: Source,
    tier: RegionTier,
    *,
    has_places: bool = False,
    claims: Claims | None = None,
    stand_ins: StandIns | None = None,
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
        follows_scores=policy.follows_scores,
        clock=clock,
    )


def fit_packages(recipe: Recipe, capacity: int) -> Recipe:
    """Return the recipe with packages for a cache of ``capacity`` bytes, if it has any."""
    if recipe.packaging is None or not capacity:
        return recipe
    return replace(recipe, packaging=recipe.packaging.fitted(capacity))


def fit_shares(
    recipe: Recipe, capacity: int, sizes: NDArray[np.int64]
) -> tuple[Shares | None, int]:
    """Return the split of a cache of ``capacity`` bytes, and the bytes its packages need.

    ``sizes`` (``i64[N]``) are those of the samples; 0 bytes where there are no packages. Raises
    :class:`~stoker.errors.ConfigError` for a cache too small for one.
    """
    packaging, shares = recipe.packaging, recipe.shares
    if packaging is None or shares is None or not capacity:
        return shares, 0
    least = packaging.least_region_bytes(sizes)
    fitted = shares.for_cache(capacity, least)
    return (shares, 0) if fitted is None else (fitted, least)


def follow(
    policy: Policy,
    plan: Plan | None,
    store: Store,
    tier: RegionTier,
    ids: Ids,
    neighbours: Neighbours | None,
    scores: Scores,
) -> None:
    """Give samples ``ids`` that have just been scored their new keys in ``tier``.

    The one with most neighbours serves for them from now on, where the recipe says so.
    """
    keys = policy.keys(ids, scores, plan, None)
    if keys is not None:
        tier.set_keys(ids, keys)
    if neighbours is not None:
        found = neighbours
        store.keep_key_sample(found.ids, found.degree, found.offsets, found.neighbours)
