"""Plans with batches: the accesses of the sampler within, by batches, divided among ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler import ImportanceSampler, SuperEpochSampler, UniformSampler
from stoker.sampler.batching import BatchedSampler, Grouping, for_ranks
from stoker.sampler.token_batches import Packing, TokenBudget
from stoker.scores import Scores

LENGTHS = np.random.default_rng(0).integers(1, 50, 300)


def sampler(seed: int = 1, **options: object) -> BatchedSampler:
    grouping = Grouping(Packing(64, rows=2, window=100), LENGTHS, seed=seed, **options)  # type: ignore[arg-type]
    return BatchedSampler(UniformSampler(len(LENGTHS), seed), grouping)


def test_a_plan_is_a_function_of_seed_and_epoch() -> None:
    plan = sampler().plan(None, 3)
    assert plan.identity == sampler().plan(None, 3).identity
    assert plan.identity not in {
        sampler(2).plan(None, 3).identity,
        sampler().plan(None, 4).identity,
    }
    assert sorted(plan.ids.tolist()) == list(range(len(LENGTHS)))
    assert len(plan) == sampler().length_at(3) == sampler().longest


def test_other_batches_are_another_plan() -> None:
    ids = np.arange(4)
    bounds = [None, np.array([0, 4]), np.array([0, 1, 4])]
    assert len({Plan(0, 0, ids, batches=each).identity for each in bounds}) == 3


def test_weights_and_batches_go_with_their_accesses() -> None:
    scores = Scores(len(LENGTHS))
    scores.update(np.arange(len(LENGTHS)), np.linspace(1, 2, len(LENGTHS)), 1)
    inner = ImportanceSampler(len(LENGTHS), 1)
    drawn = inner.plan(scores, 1)
    plan = BatchedSampler(inner, Grouping(TokenBudget(200), LENGTHS)).plan(scores, 1)
    assert drawn.weights is not None and plan.weights is not None
    assert sorted(zip(drawn.ids, drawn.weights, strict=True)) == sorted(
        zip(plan.ids, plan.weights, strict=True)
    )
    assert plan.batches is not None
    moved = plan.starting_at(7).batches
    assert moved is not None and moved.tolist() == plan.batches.tolist()


def test_batch_views_of_ranks_are_the_plan() -> None:
    plan = sampler().plan(None, 0)
    views = [plan.batch_view(rank, 3) for rank in range(3)]
    assert sorted(np.concatenate(views).tolist()) == list(range(len(plan)))


@pytest.mark.parametrize("batches", [[0, 2], [1, 3], [0, 0, 3], [0, 2, 1, 3], []])
def test_batches_that_do_not_cover_the_ids_raise(batches: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not cover 3 ids"):
        Plan(0, 0, np.arange(3), batches=np.array(batches, np.int64))


def test_an_order_that_the_cache_needs_is_left_alone() -> None:
    with pytest.raises(ConfigError, match="block= or repeat="):
        BatchedSampler(SuperEpochSampler(300, repeat=2), Grouping(TokenBudget(200), LENGTHS))


def test_nothing_is_left_where_no_batch_is_full() -> None:
    grouping = Grouping(Packing(64, rows=10_000), LENGTHS, drop_last=True)
    with pytest.raises(ConfigError, match="drop_last leaves no batch"):
        BatchedSampler(UniformSampler(300), grouping).plan(None, 0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 9), st.booleans())
def test_ranks_get_equally_many_batches_of_the_same_accesses(
    sizes: list[int], world_size: int, drop_last: bool
) -> None:
    bounds = np.append(0, np.cumsum(sizes))
    divided = for_ranks(bounds, world_size, drop_last=drop_last)
    assert (len(divided) - 1) % world_size == 0
    whole = len(sizes) - len(sizes) % world_size
    assert divided[: whole + 1].tolist() == bounds[: whole + 1].tolist()
    assert (np.diff(divided) > 0).all()
    left = int(bounds[-1] - bounds[whole])
    if drop_last:
        assert len(divided) == whole + 1
    elif left:
        assert divided[-1] - bounds[-1] == max(0, world_size - left)
        assert set(bounds.tolist()) <= set(divided.tolist())
    without = for_ranks(bounds, world_size, fill=False)
    assert without[-1] == bounds[-1]
