"""Ranks divide a plan into equal batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker import recipes
from stoker.epoch.planner import Cursor, Planner
from stoker.epoch.rank_share import RankShare
from stoker.epoch.ranks import LazyRanks, launched_ranks
from stoker.epoch.settings import EpochSettings, Population
from stoker.scores import Scores

N = 50


@given(
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_divide_a_plan_into_equal_batches(
    batch_size: int, world_size: int, drop_last: bool, epoch: int
) -> None:
    at, places, lengths = Cursor(epoch), [], []
    for rank in range(world_size):
        settings = EpochSettings(batch_size=batch_size, drop_last=drop_last)
        ranks = LazyRanks(rank, world_size, launched_ranks)
        chosen, scores = recipes.get("minio"), Scores(N)
        population = Population(N)
        planner = Planner(population, chosen.sampler, ranks, settings, chosen.policy, scores)
        share = RankShare(planner, ranks, settings, chosen.policy, scores)
        plan = planner.plan(at)
        specs = list(share.batch_specs(plan, at))
        assert len(specs) == share.batches(at)
        assert [spec.first for spec in specs] == [batch_size * i for i in range(len(specs))]
        for spec in specs:
            assert spec.ids.tolist() == plan.ids[spec.positions].tolist()
            assert set((spec.positions % world_size).tolist()) <= {rank}
        places += [spec.positions for spec in specs]
        lengths.append([len(spec.ids) for spec in specs])
    assert all(each == lengths[0] for each in lengths)
    taken = np.concatenate(places or [np.empty(0, np.int64)])
    assert len(set(taken.tolist())) == len(taken)
    if not drop_last:
        assert set(planner.plan(at).ids[taken].tolist()) == set(range(N))
