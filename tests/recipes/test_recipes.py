"""Recipes by name, and what every one of them promises."""

import pickle
import re
from dataclasses import replace

import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.recipes import Recipe


def test_names_are_sorted_and_complete():
    known = (
        "base_cis belady fifo foresight icache ilfu impact infobatch lfu lru minio oracle quiver"
    )
    known += " random s3fifo shade sieve spidercache"
    assert recipes.names() == known.split()


@pytest.mark.parametrize("name", recipes.names())
def test_each_recipe_is_a_picklable_value_under_its_own_name(name):
    recipe = recipes.get(name)
    assert recipe.name == name
    assert recipe == getattr(recipes, name)() == pickle.loads(pickle.dumps(recipe))
    assert recipe.description
    assert getattr(recipes, name).__doc__.count("ource") == 1, "a page says where it comes from"
    assert isinstance(recipe.scorer(10), Scorer)
    sampler = recipe.sampler(10, seed=1, shuffle=True, pad_to=4, drop_last=True, epochs=8)
    assert sampler.longest == 8


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"'lruu' is not known: use one of base_cis, belady, fifo"
    ):
        recipes.get("lruu")


def test_unknown_parameters_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"'s3fifo' has no parameter smal: use small, ghost"):
        recipes.get("s3fifo:smal=0.2")
    with pytest.raises(ConfigError, match=r"'lru' has no parameter x: it takes none"):
        recipes.get("lru:x=1")


def test_parameters_reach_the_policy():
    assert recipes.get("s3fifo:small=0.25").policy.regions()[0].share == 0.25
    with pytest.raises(ConfigError, match="small=2 is out of range"):
        recipes.s3fifo(small=2)


def test_a_share_above_one_is_the_whole_and_a_negative_one_is_refused():
    assert recipes.lru().predicted_hit_ratio(3.0) == 1.0
    for bad in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match="is not a share"):
            recipes.lru().predicted_hit_ratio(bad)


def test_no_closed_form_means_no_prediction():
    assert Recipe("mine", "", recipes.lru().policy).predicted_hit_ratio(0.5) is None


def test_parameters_may_stand_in_the_name():
    written = recipes.get("foresight:repeat=4:importance=true:min_ess=0.5")
    assert written.name == "foresight:repeat=4:importance=true:min_ess=0.5"
    assert replace(written, name="foresight") == recipes.foresight(4, True, min_ess=0.5)
    assert recipes.get("icache:parts=iis+hc").policy == recipes.icache(parts="iis+hc").policy
    assert recipes.get("shade:repetition=3").sampler == recipes.shade(repetition=3.0).sampler
    assert recipes.get("shade:repetition=none").sampler == recipes.shade().sampler


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lruu:x=1", "'lruu' is not known"),
        ("foresight:repeats=2", "'foresight' has no parameter repeats: use repeat, importance"),
        ("foresight:repeat", "'repeat' of a recipe cannot be read: write it as name=value"),
        ("foresight:repeat=two", "repeat=two is not a number: write a number"),
        ("foresight:repeat=1.5", "repeat=1.5 is not a number: write a number"),
        ("foresight:importance=1", "importance=1 is not a truth value: write true or false"),
    ],
)
def test_what_is_wrong_in_a_name_is_said(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        recipes.get(name)
