"""A fixed set where each sample comes once an epoch, and next use where jobs share."""

import numpy as np
import pytest

from policy.test_next_use import hits_of, uniform_plans
from stoker.errors import ConfigError
from stoker.jobs.merged import kind_of
from stoker.plan import Plan
from stoker.policy import NextUse, OnceAnEpoch, Policy
from stoker.sim import limits, replay
from stoker.testing.policy_conformance import PolicyConformance


class TestOnceAnEpoch(PolicyConformance):
    def make_policy(self) -> Policy:
        return OnceAnEpoch(100.0).for_sizes(np.arange(1, self.num_samples + 1))


def test_the_smallest_stay_the_most_in_number_that_fit() -> None:
    sizes = np.random.default_rng(0).lognormal(11, 0.6, 5_000).astype(np.int64)
    found = replay("foresight", len(sizes), 5, 0.2, sizes=sizes).after(2)
    most = limits.smallest_first(sizes, 0.2 * float(sizes.sum()))
    assert most - 0.002 < found.hit_ratio <= most
    assert found.byte_hit_ratio == pytest.approx(0.2, abs=0.002)


@pytest.mark.parametrize("request_bytes", [0.0, 1e7])
def test_of_equal_ones_the_first_stay_and_hits_are_spread(request_bytes: float) -> None:
    num, sizes = 500, np.full(500, 10)
    plans = uniform_plans(num, 3)
    policy = OnceAnEpoch(request_bytes).for_sizes(sizes)
    hits = hits_of(policy, plans, sizes, 100 * 10)
    assert set(plans[-1].ids[hits]) == set(plans[0].ids[:100])
    assert 0.4 < np.flatnonzero(hits).mean() / num < 0.6
    # By next use there are as many, and they come as the epoch begins.
    soonest = hits_of(NextUse(), plans, sizes, 100 * 10)
    assert soonest.sum() == hits.sum()
    assert np.flatnonzero(soonest).mean() / num < 0.2


def test_what_was_there_is_used_before_it_makes_room() -> None:
    """As where a cache was warmed: small samples must not push out what this epoch needs."""
    sizes = np.array([20] * 10 + [10] * 30)
    large = Plan(0, 0, np.arange(10, dtype=np.uint32))
    plans = [large]
    for epoch in (1, 2, 3):
        ids = np.random.default_rng(epoch).permutation(40).astype(np.uint32)
        plans.append(Plan(epoch, 10 + 40 * epoch, ids))
    policy = OnceAnEpoch(1e3).for_sizes(sizes)
    assert hits_of(policy, plans[:2], sizes, 200).sum() == 10
    assert hits_of(policy, plans, sizes, 200).sum() == 20


def test_times_count_only_where_other_jobs_use_the_cache() -> None:
    ids, upcoming = np.arange(4, dtype=np.uint32), np.array([4, 1, 13, 2])
    sizes = np.array([10, 20, 5, 40])
    policy = OnceAnEpoch(1e3).for_sizes(sizes)
    plan = Plan(3, 30, np.arange(10))
    # The third comes in the next epoch only; of the others the largest leaves first.
    assert np.argsort(policy.keys_at(ids, plan, upcoming)).tolist() == [2, 3, 1, 0]
    shared, times = NextUse(1e3).for_sizes(sizes), upcoming.astype(float)
    assert (policy.keys_after(ids, times) == shared.keys_after(ids, times)).all()
    assert kind_of(policy) is kind_of(NextUse())
    # What was written alone is worth less than what any job will need within ten days.
    assert policy.keys_at(ids, plan, upcoming).max() < policy.keys_after(ids, times + 864_000).min()


def test_a_request_counts_less_where_other_jobs_use_the_cache() -> None:
    sizes = np.array([100, 300], np.int64)
    assert OnceAnEpoch(1e7, sizes).shared_request_bytes == 20
    assert OnceAnEpoch(5.0, sizes).shared_request_bytes == 5
    assert OnceAnEpoch(1e7).shared_request_bytes == 0, "without sizes nothing is weighed"


def test_refuses_negative_costs() -> None:
    with pytest.raises(ConfigError, match="request_bytes=-1"):
        OnceAnEpoch(request_bytes=-1)
