"""Recipes for mixtures, replayed."""

from __future__ import annotations

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.policy import LRU, InPasses
from stoker.recipes import mixed
from stoker.sampler import Mixture, MixtureSampler
from stoker.sim import replay

WEB_AND_CODE = Mixture(("web", "code"), (4000, 500), {"web": 1, "code": 1}, 1000)


def test_what_becomes_of_a_recipe() -> None:
    recipe = mixed(recipes.foresight(), WEB_AND_CODE)
    assert recipe.policy == InPasses(1e7)
    assert mixed(recipes.foresight(request_bytes=5.0), WEB_AND_CODE).policy == InPasses(5.0)
    sampler = recipe.sampler(4500, seed=3, shuffle=True, pad_to=2, drop_last=False, epochs=None)
    assert sampler == MixtureSampler(WEB_AND_CODE, 3, pad_to=2, looks_ahead=True)
    recipe = mixed(recipes.lru(), WEB_AND_CODE)
    assert isinstance(recipe.policy, LRU)
    assert recipe.predicted_hit_ratio(0.5) is None


@pytest.mark.parametrize("name", ["shade", "icache", "spidercache", "foresight:repeat=2"])
def test_recipes_that_choose_samples_raise(name: str) -> None:
    with pytest.raises(ConfigError, match="chooses samples itself"):
        mixed(recipes.get(name), WEB_AND_CODE)


def test_another_number_of_samples_and_no_shuffle_raise() -> None:
    job = {"seed": 0, "pad_to": 1, "drop_last": False, "epochs": None}
    make = mixed(recipes.lru(), WEB_AND_CODE).sampler
    with pytest.raises(ConfigError, match="4500"):
        make(4000, shuffle=True, **job)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shuffle"):
        make(4500, shuffle=False, **job)  # type: ignore[arg-type]


def test_a_cache_divides_itself_by_the_policy() -> None:
    """A tenth of all samples: foresight keeps the source whose samples come eight times as often.

    LRU keeps half of each, and of the rarer one none long enough.
    """
    hits = {}
    for name in ("foresight", "lru", "minio"):
        recipe = mixed(recipes.get(name), WEB_AND_CODE)
        result = replay(recipe, 4500, 12, cache=0.1, sizes=np.full(4500, 1000))
        hits[name] = np.mean([epoch.hits / 1000 for epoch in result.per_epoch[4:]])
    # All of the cache for the code would be 90 % of half of the accesses.
    assert 0.42 < hits["foresight"] < 0.5
    assert hits["foresight"] > 1.5 * hits["lru"]
    assert hits["foresight"] > 1.2 * hits["minio"]
