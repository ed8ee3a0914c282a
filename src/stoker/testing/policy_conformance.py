"""What every policy must do, as tests to inherit."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stoker.plan import Plan
from stoker.policy.base import Policy, as_policy
from stoker.sampler.uniform import UniformSampler
from stoker.scores import Scores
from stoker.store.arena import Arena


class PolicyConformance:
    """Subclass it as ``class TestMine(PolicyConformance)`` and return yours from ``make_policy``.

    pytest then runs it against an arena, with scores and a plan.
    """

    num_samples = 200
    capacity = 1000

    def make_policy(self) -> Policy:
        """Return a new policy."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> Policy:
        """A new policy for each test."""
        return as_policy(self.make_policy())

    @pytest.fixture
    def arena(self, policy: Policy) -> Iterator[Any]:
        """An empty arena with the regions of the policy."""
        # A block for every id, so that payload bytes alone decide.
        with Arena(self.num_samples, self.capacity, mean_size=1, exact=True) as arena:
            arena.configure(policy.regions())
            yield arena

    @pytest.fixture
    def scores(self) -> Scores:
        """Scores in which half of the samples have been seen."""
        scores = Scores(self.num_samples)
        ids = np.arange(0, self.num_samples, 2)
        scores.update(ids, np.random.default_rng(1).random(len(ids)), step=3)
        return scores

    @pytest.fixture
    def plan(self) -> Plan:
        """A uniform plan that is not the first of its job."""
        return UniformSampler(self.num_samples, seed=1).plan(None, epoch=1)

    def test_is_a_policy(self, policy: Policy) -> None:
        """It has every member of the protocol, and a name."""
        assert isinstance(policy, Policy)
        assert policy.name and policy.name == policy.name.lower()

    def test_regions_fit_together(self, policy: Policy) -> None:
        """Names are unique, references lead somewhere, byte shares fill at most the arena."""
        regions = policy.regions()
        assert regions and regions[0].holds_bytes
        names = [region.name for region in regions]
        assert len(set(names)) == len(names)
        holding = {region.name for region in regions if region.holds_bytes}
        assert sum(region.share for region in regions if region.holds_bytes) <= 1 + 1e-9
        for region in regions:
            assert region.promote_to is None or region.promote_to in holding - {region.name}
            assert region.ghost is None or region.ghost in set(names) - holding
        assert policy.regions() == regions

    def test_keys_are_one_number_per_id(self, policy: Policy, scores: Scores, plan: Plan) -> None:
        """f64[n] without NaN, also for no ids; None exactly where keys are natural."""
        for ids in (plan.ids[:17], plan.ids[:0]):
            keys = policy.keys(ids, scores, plan, np.arange(len(ids)))
            assert (keys is None) == policy.natural_keys
            if keys is not None:
                assert keys.shape == ids.shape and keys.dtype == np.float64
                assert not np.isnan(keys).any()

    def test_keys_that_are_scores_are_just_that(
        self, policy: Policy, scores: Scores, plan: Plan
    ) -> None:
        """Where keys are said to be scores: the latest one, and -inf for samples not seen."""
        keys = policy.keys(plan.ids, scores, plan, None)
        if policy.keys_are_scores:
            latest = np.where(scores.seen > 0, scores.values, -np.inf)
            np.testing.assert_array_equal(keys, latest[plan.ids])

    def test_keys_are_pure(self, policy: Policy, scores: Scores, plan: Plan) -> None:
        """The same question has the same answer, later and in a pickled copy."""
        position = np.arange(5, 25)
        ids = plan.ids[5:25]
        before = scores.values.copy()
        first = policy.keys(ids, scores, plan, position)
        policy.keys(plan.ids[:50], scores, plan, None)
        copy = pickle.loads(pickle.dumps(policy))
        assert copy.regions() == policy.regions()
        for other in (policy, copy):
            again = other.keys(ids, scores, plan, position)
            assert (first is None) == (again is None)
            if first is not None and again is not None:
                np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(scores.values, before)

    def test_places_are_regions_that_hold_samples(
        self, policy: Policy, scores: Scores, plan: Plan
    ) -> None:
        """u8[N], pure, the same in a pickled copy; also before anything was seen."""
        holding = [region.holds_bytes for region in policy.regions()]
        copy = pickle.loads(pickle.dumps(policy))
        for known in (scores, Scores(self.num_samples)):
            found = policy.places(known, plan, self.num_samples)
            assert found.shape == (self.num_samples,) and found.dtype == np.uint8
            assert all(holding[place] for place in np.unique(found))
            np.testing.assert_array_equal(found, copy.places(known, plan, self.num_samples))

    @pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
    def test_serves_a_trace(
        self, policy: Policy, scores: Scores, plan: Plan, arena: Any, unequal: bool
    ) -> None:
        """Over a random trace: right bytes, never above capacity, invariants hold."""
        rng = random.Random(2)
        sizes = [rng.randint(0, 40) if unequal else 10 for _ in range(self.num_samples)]
        entrance = policy.regions()[0].name
        hits = 0
        for step in range(1500):
            ids = np.array([int(rng.paretovariate(0.6)) % self.num_samples], dtype=np.uint32)
            sample = bytes([int(ids[0])]) * sizes[int(ids[0])]
            data, _, found = arena.get_many(ids)
            if found[0]:
                hits += 1
                assert data.tobytes() == sample
            else:
                keys = policy.keys(ids, scores, plan, np.array([step % len(plan)]))
                arena.put_many(ids, [sample], keys, region=entrance)
            assert arena.stats()["payload_bytes"] <= self.capacity
        arena.verify()
        assert hits
