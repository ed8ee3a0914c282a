"""Foresight: what its plan repeats, and what it promises to hit."""

from dataclasses import replace

import numpy as np
import pytest

from stoker import recipes
from stoker.errors import ConfigError
from stoker.policy import AsPlanned, NextBlock, OnceAnEpoch
from stoker.policy.score import Score
from stoker.recipes.base import part
from stoker.sampler import BlockSampler, ImportanceSampler, InfoBatchSampler, SuperEpochSampler
from stoker.sampler.super_epochs import Room
from stoker.sim import Conditions, replay

JOB = {"seed": 1, "shuffle": True, "pad_to": 1, "drop_last": False, "epochs": 16}


def test_by_default_each_sample_comes_once_an_epoch():
    recipe = recipes.foresight()
    plan = recipe.sampler(100, **JOB).plan(None, 3)
    assert sorted(plan.ids.tolist()) == list(range(100))
    assert plan.ids.tolist() == recipes.belady().sampler(100, **JOB).plan(None, 3).ids.tolist()
    assert recipe.predicted_hit_ratio(0.2) == pytest.approx(0.2)
    assert recipe.policy == OnceAnEpoch(1e7)


def test_parameters_reach_their_parts():
    recipe = recipes.foresight(repeat=3, window=0.5, annealed=0.25, request_bytes=1e5)
    sampler = recipe.sampler(100, **JOB)
    assert isinstance(sampler, SuperEpochSampler)
    assert (sampler.repeat, sampler.window, sampler.annealed, sampler.epochs) == (3, 0.5, 0.25, 16)
    assert recipe.policy == AsPlanned(1e5, repeated_bytes=1e5)
    assert recipe != recipes.foresight()


def test_windows_are_chosen_for_the_cache_unless_they_are_given():
    sizes = np.full(2000, 100)
    room = Room(sizes, 80_000)
    assert recipes.foresight(repeat=4).sampler_for(room)(2000, **JOB).window == pytest.approx(1.6)
    assert recipes.foresight(repeat=4).sampler(2000, **JOB).window == pytest.approx(0.8)
    given = recipes.foresight(repeat=4, window=1.0, static=0.5).sampler_for(room)(2000, **JOB)
    assert given.window == 1.0
    assert len(given.static) == 400
    assert recipes.foresight().sampler_for(room) == recipes.foresight().sampler


def test_predictions():
    assert recipes.foresight(repeat=2).predicted_hit_ratio(0.2) == pytest.approx(0.55)
    assert recipes.foresight(repeat=4).predicted_hit_ratio(0.2) == pytest.approx(0.7625)
    long = recipes.foresight(repeat=4, window=1.6)
    assert long.predicted_hit_ratio(0.2) == pytest.approx(0.7625 / 2)
    assert recipes.foresight(repeat=4).predicted_hit_ratio(1.0) == 1
    assert recipes.foresight(repeat=4).predicted_hit_ratio(0.0) == 0


@pytest.mark.parametrize("cache", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("repeat", [2, 4, 8])
def test_it_hits_what_is_predicted(cache, repeat):
    recipe = recipes.foresight(repeat=repeat, annealed=0.0)
    epochs = replay(recipe, 8_000, 3 * repeat, cache).per_epoch[repeat:]
    predicted = recipe.predicted_hit_ratio(cache)
    assert predicted - 0.01 < hits(epochs) < 1 - (1 - cache) / repeat
    assert hits(epochs) < predicted + 0.07


def test_the_smallest_samples_stay_where_sizes_differ():
    """Of ImageNet-like sizes at a cache of 20 %: more hits, of samples and of bytes."""
    sizes = (np.random.default_rng(1).lognormal(0, 0.6, 8_000) * 92_000).astype(np.int64)
    chosen, without = (
        replay(recipes.foresight(repeat=4, annealed=0.0, **how), 8_000, 12, 0.2, sizes).per_epoch[
            4:
        ]
        for how in ({}, {"static": 0.0})
    )
    assert hits(chosen) > hits(without) + 0.03 > 0.79
    served = sum(epoch.served_bytes for epoch in chosen)
    assert sum(epoch.hit_bytes for epoch in chosen) / served > 0.77
    assert np.mean([epoch.coverage for epoch in chosen]) > 0.47
    assert np.mean([epoch.ess for epoch in chosen]) > 0.33


def test_the_annealed_end_hits_as_the_default_does():
    sizes = (np.random.default_rng(1).lognormal(0, 0.6, 8_000) * 92_000).astype(np.int64)
    epochs = replay(recipes.foresight(repeat=4), 8_000, 16, 0.2, sizes).per_epoch
    assert hits(epochs[15:]) > 0.39


@pytest.mark.parametrize("cache", [0.1, 0.2])
def test_by_importance_it_hits_ten_points_more_than_a_cache_of_the_top_scores(cache):
    recipe = recipes.foresight(importance=True, repeat=4)
    by_plan, by_score = (
        hits(replay(one, 4000, 16, cache).per_epoch[8:14])
        for one in (recipe, replace(recipe, policy=Score()))
    )
    assert by_plan >= by_score + 0.1
    # And more than as many uniform visits in one random order, for any cache.
    assert by_plan >= cache + (1 - 1 / 4) ** 4


def test_what_is_expected_beyond_the_plan_matters():
    recipe = recipes.foresight(importance=True)
    blind = part(Blind, repeat=1, annealed=0.0)
    known, unknown = (
        hits(replay(one, 4000, 12, 0.4).per_epoch[6:10])
        for one in (recipe, replace(recipe, sampler=blind))
    )
    assert known > unknown + 0.03


def test_s10_adaptive_begins_with_all_that_the_default_gains():
    """The smallest samples stay: 40.4 % of the accesses hit, where next use alone hits 20.0 %."""
    sizes = np.random.default_rng(1).lognormal(0, 0.6, 8_000) * 92_000
    default, adaptive = (
        [epoch.hits for epoch in replay(one, 8_000, 4, 0.2, sizes.astype(np.int64)).per_epoch]
        for one in (recipes.foresight(), recipes.foresight(adaptive=True))
    )
    assert adaptive == default
    assert adaptive[-1] > 0.38 * 8_000


class Blind(ImportanceSampler):
    """Does not say what it expects."""

    def draw(self, scores, epoch, rng):
        return super().draw(scores, epoch, rng)._replace(beyond=None)


def hits(epochs):
    return sum(e.hits for e in epochs) / sum(e.accesses for e in epochs)


def test_pruning_stands_alone():
    assert isinstance(recipes.foresight(prune=0.5).sampler(100, **JOB), InfoBatchSampler)
    for more in ({"repeat": 2}, {"importance": True}):
        with pytest.raises(ConfigError, match=r"prune=0\.5"):
            recipes.foresight(prune=0.5, **more)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeat": 0},
        {"annealed": 2},
        {"request_bytes": -1},
        {"window": 0.5},
        {"static": 0.5, "repeat": 2, "importance": True},
        {"static": 1.5, "repeat": 2},
        {"window": -1.0, "repeat": 2},
    ],
)
def test_refuses_what_has_no_meaning(wrong):
    with pytest.raises(ConfigError, match=r"exclude each other|has no effect|out of range"):
        recipes.foresight(**wrong).sampler(100, **JOB)


@pytest.mark.parametrize("idle", [{"uniform_part": 0.3}, {"min_ess": 0.5}, {"min_ess": 0.7}])
@pytest.mark.parametrize("how", [{}, {"repeat": 2}, {"prune": 0.5}])
def test_s15_bounds_of_importance_are_refused_without_it(idle, how):
    with pytest.raises(ConfigError, match="has no effect without importance=True"):
        recipes.foresight(**how, **idle)
    recipes.foresight(importance=True, **idle)


def test_blocks_are_shuffled_over_what_the_cache_holds():
    recipe = recipes.get("foresight:block=32")
    room = Room(np.full(2000, 100), 40_000, np.array([500]))
    sampler = recipe.sampler_for(room)(2000, **JOB)
    assert isinstance(sampler, BlockSampler)
    assert (sampler.block, sampler.window, sampler.breaks.tolist()) == (32, 0.2, [500])
    assert recipe.policy == NextBlock()
    given = recipes.foresight(block=8, window=0.1)
    assert given.sampler_for(room)(2000, **JOB).window == 0.1
    in_order = given.sampler_for(Room(np.full(2000, 100), 0))(2000, **{**JOB, "shuffle": False})
    assert not in_order.reads_blocks


@pytest.mark.parametrize(
    "other",
    [
        {"repeat": 2},
        {"importance": True},
        {"prune": 0.5},
        {"adaptive": True},
        {"static": 0.1},
        {"request_bytes": 1.0},
        {"window": 2.0},
        {"min_ess": 0.5},
        {"block": 0},
    ],
)
def test_blocks_go_with_no_other_way_to_draw_an_epoch(other):
    with pytest.raises(ConfigError, match=f"{next(iter(other))}="):
        recipes.foresight(**{"block": 32, **other})


def test_blocks_are_simulated_with_what_is_read_ahead_and_without_time():
    with pytest.raises(ConfigError, match="read_ahead="):
        replay("foresight:block=32", 1000, 2, 0.2)
    with pytest.raises(ConfigError, match="leave conditions out"):
        timed = Conditions(compute_rate=100.0)
        replay("foresight:block=32", 1000, 2, 0.2, conditions=timed, read_ahead=1 << 20)
