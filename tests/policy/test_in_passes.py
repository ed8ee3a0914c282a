"""A fixed set of the source whose samples come most often."""

import numpy as np

from policy.test_next_use import hits_of
from stoker.plan import Plan
from stoker.policy import InPasses, OnceAnEpoch, Policy
from stoker.sampler import Mixture, MixtureSampler
from stoker.testing.policy_conformance import PolicyConformance

MIXTURE = Mixture(("web", "code"), (600, 50), {"web": 1, "code": 1}, 200)


class TestInPasses(PolicyConformance):
    def make_policy(self) -> Policy:
        return InPasses(100.0).for_sizes(np.arange(1, self.num_samples + 1))


def plans_of(mixture: Mixture, epochs: int) -> list[Plan]:
    sampler = MixtureSampler(mixture, looks_ahead=True)
    return [sampler.plan(None, epoch) for epoch in range(epochs)]


def test_the_source_with_short_passes_stays_and_hits_are_spread() -> None:
    plans, sizes = plans_of(MIXTURE, 8), np.full(650, 10)
    policy = InPasses(1e7).for_sizes(sizes)
    hits = hits_of(policy, plans, sizes, 100 * 10)
    for begin in range(0, 200, 50):
        assert hits[begin : begin + 50].sum() >= 22, "all of the code, and some of the web"
    assert set(range(600, 650)) <= set(plans[-1].ids[hits].tolist())


def test_of_one_source_the_smallest_stay() -> None:
    mixture = Mixture(("a", "b"), (40, 40), {"a": 3, "b": 1}, 40)
    sizes = np.tile(np.arange(10, 50), 2)
    ids = np.arange(80, dtype=np.uint32)
    plan = plans_of(mixture, 1)[0]
    keys = InPasses(1e3, sizes).keys(ids, None, plan, None)
    assert np.argsort(keys)[::-1].tolist() == [*range(40), *range(40, 80)]


def test_the_plan_that_follows_may_say_it() -> None:
    """What is left of an epoch that resumes expects nothing by itself."""
    first, later = plans_of(MIXTURE, 2)
    ids = np.arange(650, dtype=np.uint32)
    rest = Plan(0, 100, first.ids[100:]).followed_by(later)
    policy = InPasses()
    np.testing.assert_array_equal(
        policy.keys(ids, None, rest, None), policy.keys(ids, None, later, None)
    )
    alone = Plan(0, 100, first.ids[100:])
    expected = OnceAnEpoch().keys(alone.ids, None, alone, None)
    np.testing.assert_array_equal(policy.keys(alone.ids, None, alone, None), expected)
