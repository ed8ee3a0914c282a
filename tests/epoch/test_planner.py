"""Plans of epochs: foreseen ones are those that come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker import recipes
from stoker.epoch.planner import Cursor, Planner, Walk
from stoker.epoch.ranks import LazyRanks, launched_ranks
from stoker.epoch.settings import EpochSettings, Population
from stoker.errors import ConfigError
from stoker.sampler.super_epochs import Windows
from stoker.scores import Scores

N = 50


def planner_of(
    recipe: str, rank: int = 0, world_size: int = 1, ids: Any = None, **settings: Any
) -> Planner:
    chosen = recipes.get(recipe)
    return Planner(
        Population(N, ids),
        chosen.sampler,
        LazyRanks(rank, world_size, launched_ranks),
        EpochSettings(**settings),
        chosen.policy,
        Scores(N),
    )


@pytest.mark.parametrize("recipe", ["foresight:repeat=3", "belady", "minio"])
@pytest.mark.parametrize("ids", [None, np.arange(5, 30, dtype=np.uint32)])
def test_a_plan_is_the_same_whether_it_was_foreseen_or_not(recipe: str, ids: Any) -> None:
    one = planner_of(recipe, ids=ids, epochs=6)
    for epoch in range(6):
        followed, fresh = one.plan(Cursor(epoch)), planner_of(recipe, ids=ids, epochs=6)
        alone = fresh.plan(Cursor(epoch))
        assert (followed.identity, followed.start) == (alone.identity, alone.start)
        assert (followed.following is None) == (alone.following is None)
        if alone.following is not None and followed.following is not None:
            assert followed.following.identity == alone.following.identity
        np.testing.assert_array_equal(followed.next_use, alone.next_use)


def test_what_was_foreseen_is_forgotten_where_training_resumes_elsewhere() -> None:
    planner = planner_of("belady")
    planner.plan(Cursor(0))
    planner.note_served(Cursor(1, 8, 2), np.arange(8, dtype=np.uint32))
    rest = planner.plan(Cursor(1, 8, 2))
    assert len(rest) == N - 8
    assert set(rest.ids.tolist()) == set(range(8, N)), "what was served is not served again"


def test_a_step_that_could_have_a_sample_twice_is_refused() -> None:
    apart = Windows.of(N, 2, 0.4).apart
    planner_of("foresight:repeat=2:window=0.8", batch_size=apart).check_step()
    with pytest.raises(ConfigError, match=rf"has {apart + 1} samples.*after {apart} accesses"):
        planner_of("foresight:repeat=2:window=0.8", batch_size=apart + 1).check_step()


def test_a_step_takes_a_stride_of_the_plan_whatever_this_rank_got() -> None:
    walk = Walk(Cursor(3), stride=16, end=42, world_size=4)
    assert walk.cursor == Cursor(3)
    walk.step(4)
    assert walk.cursor == Cursor(3, 16, 1)
    walk.step(4)
    walk.step(2)
    assert walk.cursor == Cursor(3, 42, 3)


def test_it_goes_on_from_where_it_begins() -> None:
    walk = Walk(Cursor(1, 40, 5), stride=8, end=100, world_size=2)
    walk.step(4)
    assert (walk.start, walk.cursor) == (Cursor(1, 40, 5), Cursor(1, 48, 6))


def test_without_a_plan_each_rank_is_taken_to_have_as_much() -> None:
    walk = Walk(Cursor(), stride=None, end=None, world_size=3)
    walk.step(5)
    walk.step(2)
    assert walk.cursor == Cursor(0, 21, 2)
