"""Plans of epochs: foreseen ones are those that come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker import recipes
from stoker.epoch.cursor import Cursor
from stoker.epoch.planner import Planner
from stoker.epoch.ranks import LazyRanks, launched_ranks
from stoker.epoch.settings import EpochSettings, Population
from stoker.errors import ConfigError
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


def test_a_step_larger_than_a_group_is_refused() -> None:
    planner_of("foresight:repeat=2:group=0.5", batch_size=25).check_step()
    with pytest.raises(ConfigError, match=r"group=0\.52"):
        planner_of("foresight:repeat=2:group=0.5", batch_size=26).check_step()
