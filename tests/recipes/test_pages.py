"""The pages of papers: ablations are parameters, and each adds what its paper adds."""

from __future__ import annotations

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.base import Background
from stoker.importance.baselines import LossHistory, ReducibleLoss
from stoker.importance.hybrid import Hybrid, Realtime
from stoker.policy import LFU, LRU, HighLow, Homophily, Score, StaticSet, Substitution
from stoker.recipes import Recipe
from stoker.recipes.spidercache import neighbours_for
from stoker.sampler import Sampler, SelectiveSampler


def sampler_of(recipe: Recipe, epochs: int | None = 16) -> Sampler:
    job = {"seed": 1, "shuffle": True, "pad_to": 1, "drop_last": False}
    return recipe.sampler(100, **job, epochs=epochs)  # type: ignore[arg-type]


def test_icache_part_by_part():
    iis, high, whole = (recipes.icache(parts=p) for p in ("iis", "iis+hc", "iis+hc+lc"))
    assert iis.policy == LRU()
    assert high.policy == Score(ties=False)
    assert whole.policy == HighLow(0.7, 0.9)
    assert iis.sampler == high.sampler == whole.sampler
    assert [r.substitution is not None for r in (iis, high, whole)] == [False, False, True]
    assert [r.packaging is not None for r in (iis, high, whole)] == [False, False, True]
    assert whole == recipes.icache()
    assert whole.packaging is not None and whole.packaging.min_bytes == 1 << 20


def test_icache_by_default_is_as_the_public_code_of_its_authors():
    sampler = sampler_of(recipes.icache())
    assert isinstance(sampler, SelectiveSampler)
    assert (sampler.beta, sampler.warm_up, sampler.full_every) == (0.33, 5, 3)
    assert [sampler.length_at(epoch) for epoch in range(9)] == [100] * 5 + [75, 75, 100, 75]
    assert sampler_of(recipes.ilfu()) == sampler


def test_impact_by_evaluation():
    hybrid, history, realtime = (
        recipes.impact(evaluation=e) for e in ("hybrid", "history", "realtime")
    )
    assert isinstance(hybrid.scorer(100), Hybrid)
    assert hybrid.policy == StaticSet(0.25, HighLow(0.7, 0.9))
    assert isinstance(history.scorer(100), LossHistory)
    assert isinstance(realtime.scorer(100), Realtime)
    assert history.policy == realtime.policy == HighLow(0.7, 0.9)
    # The hybrid scorer itself asks for full passes; the others begin as iCache does.
    assert sampler_of(hybrid).length_at(0) == 75
    assert sampler_of(history).length_at(4) == 100


def test_impact_without_its_l_cache():
    recipe = recipes.impact(parts="iis+hc")
    assert recipe.substitution is None and recipe.packaging is None
    assert recipe.policy == StaticSet(0.25, HighLow(1.0, 0.9))


def test_impact_over_lru_and_lfu():
    plain, frequent = (recipes.impact(parts=p) for p in ("iip", "iip+lfu"))
    assert (plain.policy, frequent.policy) == (LRU(), LFU())
    assert plain.sampler == frequent.sampler == recipes.impact().sampler
    for recipe in (plain, frequent):
        assert isinstance(recipe.scorer(100), Hybrid)
        assert recipe.shares is recipe.substitution is recipe.packaging is None
        assert recipe.unscored is not None and recipe.unscored.policy == recipe.policy


def test_an_h_list_that_moves_is_a_parameter_of_both():
    assert recipes.get("icache:split=moving").policy == HighLow(0.7, 0.9, "moving")
    hybrid = recipes.get("impact:split=moving")
    assert hybrid.policy == StaticSet(0.25, HighLow(0.7, 0.9, "moving"))
    assert hybrid.unscored is not None
    assert hybrid.unscored.policy == HighLow(0.7, 0.9, "moving")
    for name in ("icache", "impact"):
        with pytest.raises(ConfigError, match="use one of fixed, moving"):
            recipes.get(f"{name}:split=loose")


def test_icache_substitutes_by_low_or_by_high():
    low, high = recipes.icache(), recipes.get("icache:substitute=high")
    assert low.substitution == Substitution("low_by_low", "L")
    assert high.substitution == Substitution("low_by_high", "L", by="H")
    assert high.packaging == low.packaging and high.policy == low.policy
    with pytest.raises(ConfigError, match="substitute='any' is not known: use one of low, high"):
        recipes.icache(substitute="any")


def test_impact_takes_a_reference_for_reducible_losses():
    reference = ReducibleLoss(np.ones(100))
    assert recipes.impact("history", of=reference).scorer(100) is reference
    with pytest.raises(ConfigError, match="leave out of="):
        recipes.impact("realtime", of=reference)


def test_spidercache_part_by_part():
    pytest.importorskip("faiss", reason="faiss is not installed")
    names = ("importance", "importance+homophily", "importance+homophily+elastic")
    importance, homophily, elastic = (recipes.spidercache(parts=p) for p in names)
    assert importance.policy == Score(ties=False) and importance.substitution is None
    assert homophily.policy == Homophily(0.9) and homophily.shares is None
    assert elastic.shares is not None and elastic == recipes.spidercache()
    scorer = elastic.scorer(100)
    assert isinstance(scorer, Background)
    scorer.close()


def test_spidercache_scales_with_the_data():
    assert [neighbours_for(n) for n in (60, 4_000, 50_000, 1_281_167)] == [
        (10, 1),
        (40, 4),
        (500, 50),
        (500, 50),
    ]
    assert neighbours_for(4_000, neighbor_max=100) == (100, 10)
    assert neighbours_for(4_000, target_degree=8) == (80, 8)
    assert neighbours_for(4_000, 500, 50) == (500, 50)


def test_spidercache_takes_its_scale_as_text():
    pytest.importorskip("faiss", reason="faiss is not installed")
    recipe = recipes.get("spidercache:neighbor_max=20:target_degree=2.5:transit=0.1")
    assert recipe.policy == Homophily(0.9, 0.1)
    scorer = recipe.scorer(1000)
    scorer.close()
    for wrong in (
        "code_bytes=0",
        "neighbor_max=0",
        "neighbor_max=2.5",
        "neighbor_max=5:target_degree=6",
    ):
        with pytest.raises(ConfigError, match="is out of range"):
            recipes.get(f"spidercache:{wrong}").scorer(1000)
    recipes.get("spidercache:code_bytes=16").scorer(1000).close()


def test_infobatch_must_know_its_end():
    assert sampler_of(recipes.infobatch(), epochs=8).length_at(7) == 100
    with pytest.raises(ConfigError, match="epochs="):
        sampler_of(recipes.infobatch(), epochs=None)


@pytest.mark.parametrize("name", ["icache", "impact", "spidercache"])
def test_unknown_parts_list_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"parts='all' is not known: use one of i"):
        getattr(recipes, name)(parts="all")
    if name == "impact":
        with pytest.raises(ConfigError, match="hybrid, history, realtime"):
            getattr(recipes, name)(evaluation="fresh")
