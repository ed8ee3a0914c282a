"""Next use against Belady's rule played out by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy import AsPlanned, NextBlock, NextUse, OnceAnEpoch, Policy
from stoker.sampler.uniform import UniformSampler
from stoker.store.arena import Arena
from stoker.testing.policy_conformance import PolicyConformance


class TestNextUse(PolicyConformance):
    def make_policy(self) -> Policy:
        return NextUse()


class TestNextUseWithACost(PolicyConformance):
    def make_policy(self) -> Policy:
        return NextUse(request_bytes=100).for_sizes(np.arange(1, self.num_samples + 1))


class TestNextBlock(PolicyConformance):
    def make_policy(self) -> Policy:
        return NextBlock()


class TestAsPlanned(PolicyConformance):
    def make_policy(self) -> Policy:
        return AsPlanned(100).for_sizes(np.arange(1, self.num_samples + 1))


def test_as_planned_the_rule_follows_the_plan() -> None:
    sizes, ids = np.arange(1, 101), np.arange(100, dtype=np.uint32)
    policy = AsPlanned(100.0, repeated_bytes=5.0).for_sizes(sizes)
    for plan, rule in (
        (Plan(1, 100, np.random.default_rng(1).permutation(ids)), OnceAnEpoch(100.0, sizes)),
        (Plan(1, 100, np.append(ids, ids[:4])), OnceAnEpoch(100.0, sizes)),  # filled up for ranks
        (Plan(1, 100, ids // 2, repeats=True), NextUse(5.0, sizes)),
    ):
        expected = rule.keys(ids, None, plan, None)
        assert np.array_equal(policy.keys(ids, None, plan, None), expected)
    with pytest.raises(ConfigError, match="request_bytes=-1"):
        AsPlanned(1.0, repeated_bytes=-1.0)


def hits_of(policy: NextUse, plans: list[Plan], sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Play the plans; return bool per access of the last one."""
    with Arena(len(sizes), capacity, float(sizes.mean()), exact=True) as arena:
        arena.configure(policy.regions())
        for plan in plans:
            everything = np.arange(len(sizes), dtype=np.uint32)
            cached = everything[arena.contains(everything)]
            arena.set_keys(cached, policy.keys(cached, None, plan, None))
            hits = np.zeros(len(plan), bool)
            for at in range(len(plan)):
                ids = plan.ids[at : at + 1]
                keys = policy.keys(ids, None, plan, np.array([at]))
                hits[at] = arena.contains(ids)[0]
                if hits[at]:
                    arena.set_keys(ids, keys)
                else:
                    arena.put_many(ids, [bytes(sizes[ids[0]])], keys)
        return hits


def belady(ids: list[int], capacity: int) -> list[bool]:
    """The textbook rule for equal sizes, with the right to refuse the newcomer."""

    def next_use(sample: int, after: int) -> float:
        later = [at for at in range(after + 1, len(ids)) if ids[at] == sample]
        return later[0] if later else float("inf")

    cached: set[int] = set()
    hits = []
    for at, sample in enumerate(ids):
        hits.append(sample in cached)
        cached.add(sample)
        if len(cached) > capacity:
            cached.remove(max(cached, key=lambda i: next_use(i, at)))
    return hits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [1, 3, 10])
def test_as_many_hits_as_the_textbook(seed: int, capacity: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 20, 300)
    plan = Plan(0, 0, ids.astype(np.uint32))
    hits = hits_of(NextUse(), [plan], np.full(20, 10), capacity * 10)
    assert hits.sum() == sum(belady(ids.tolist(), capacity))


def uniform_plans(num_samples: int, epochs: int) -> list[Plan]:
    sampler = UniformSampler(num_samples, seed=3)
    plans = [sampler.plan(None, epoch) for epoch in range(epochs + 1)]
    return [replace(plan, following=after) for plan, after in pairwise(plans)]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_uniform_epochs_hit_the_ceiling_in_bytes(share: float) -> None:
    sizes = np.random.default_rng(0).integers(10, 200, 1000)
    plans = uniform_plans(1000, 3)
    hits = hits_of(NextUse(), plans, sizes, int(share * sizes.sum()))
    assert abs(sizes[plans[-1].ids[hits]].sum() / sizes.sum() - share) < 0.01


def test_with_a_cost_more_samples_are_hit() -> None:
    sizes = np.maximum(10, np.random.default_rng(0).lognormal(5, 0.7, 1000)).astype(np.int64)
    plans = uniform_plans(1000, 3)
    policy = NextUse(request_bytes=1e6).for_sizes(sizes)
    hits = hits_of(policy, plans, sizes, int(0.2 * sizes.sum()))
    smallest = np.searchsorted(np.cumsum(np.sort(sizes)), 0.2 * sizes.sum()) / 1000
    assert 0.95 * smallest < hits.mean() <= smallest


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="request_bytes=-1"):
        NextUse(request_bytes=-1)


def test_next_block_keeps_whole_blocks_for_the_next_epoch() -> None:
    ids = np.arange(6, dtype=np.uint32)
    later = Plan(1, 6, ids[[4, 0, 2, 5, 1, 3]], blocks=np.array([2, 0, 1, 2, 0, 1]))
    plan = Plan(0, 0, ids, blocks=ids // 2).followed_by(later)
    assert later.block_use.tolist() == [1, 1, 2, 2, 0, 0]
    now = NextBlock().keys(ids, None, plan, None)
    assert now.tolist() == [-0.0, -0.0, -2, -2, -4, -4]
    after = NextBlock().keys(ids, None, plan, np.arange(6))
    assert after.tolist() == [-9.5, -9.5, -9, -9, -7, -7]  # 7, 6 and 2 accesses from use to use
    rest = plan.part(np.arange(4, 6), 4).followed_by(later)
    left = NextBlock().keys(ids[4:], None, rest, np.arange(2))
    before = NextBlock().keys(ids[:4], None, rest, None)
    assert left.tolist() == [-4 - 2 - 1, -4 - 2 - 1]
    assert before.tolist() == [-4 - 2 - 1.5, -4 - 2 - 1.5, -4 - 2 - 2, -4 - 2 - 2]
    alone = plan.followed_by(None)
    expected = NextUse().keys(ids, None, alone, np.arange(6))
    assert np.array_equal(NextBlock().keys(ids, None, alone, np.arange(6)), expected)
