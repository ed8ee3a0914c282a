"""Foresight: what its plan repeats, and what it promises to hit."""

import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.policy import NextUse
from stoker.sampler import SuperEpochSampler

JOB = {"seed": 1, "shuffle": True, "pad_to": 1, "drop_last": False, "epochs": 16}


def test_by_default_each_sample_comes_once_an_epoch():
    recipe = recipes.foresight()
    plan = recipe.sampler(100, **JOB).plan(None, 3)
    assert sorted(plan.ids.tolist()) == list(range(100))
    assert plan.ids.tolist() == recipes.belady().sampler(100, **JOB).plan(None, 3).ids.tolist()
    assert recipe.predicted_hit_ratio(0.2) == pytest.approx(0.2)


def test_parameters_reach_their_parts():
    recipe = recipes.foresight(repeat=3, annealed=0.25, request_bytes=1e5)
    sampler = recipe.sampler(100, **JOB)
    assert isinstance(sampler, SuperEpochSampler)
    assert (sampler.repeat, sampler.annealed, sampler.epochs) == (3, 0.25, 16)
    assert recipe.policy == NextUse(1e5)
    assert recipe != recipes.foresight()


def test_predictions():
    assert recipes.foresight(repeat=2).predicted_hit_ratio(0.2) == pytest.approx(0.45)
    assert recipes.foresight(repeat=4).predicted_hit_ratio(0.2) == pytest.approx(0.516, abs=0.001)
    assert recipes.foresight(repeat=4).predicted_hit_ratio(0.9) == 1


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"annealed": 2}, {"request_bytes": -1}])
def test_refuses_what_has_no_meaning(wrong):
    with pytest.raises(ConfigError, match="is refused"):
        recipes.foresight(**wrong).sampler(100, **JOB)
