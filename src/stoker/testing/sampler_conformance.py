"""What every sampler must do, as tests to inherit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler.base import Sampler, as_sampler
from stoker.scores import Scores


class SamplerConformance:
    """Subclass it as ``class TestMine(SamplerConformance)`` and return yours from ``make_sampler``.

    ``num_samples`` is the number of ids, ``world_size`` the number of ranks that must get plans
    of equal length, ``epoch`` one at which the sampler does what it is made for.
    """

    num_samples = 103
    world_size = 4
    epoch = 5

    def make_sampler(self, pad_to: int) -> Sampler:
        """Return a new sampler over ``num_samples`` ids for ``pad_to`` ranks."""
        raise NotImplementedError

    def _made(self, pad_to: int) -> Sampler:
        return as_sampler(self.make_sampler(pad_to))

    @pytest.fixture
    def sampler(self) -> Sampler:
        """A new sampler for each test."""
        return self._made(self.world_size)

    @pytest.fixture
    def scores(self) -> Scores:
        """A snapshot in which half of the samples have been seen."""
        scores = Scores(self.num_samples)
        ids = np.arange(0, self.num_samples, 2)
        scores.update(ids, np.random.default_rng(1).random(len(ids)), step=3)
        for epoch, accuracy in enumerate((0.2, 0.3, 0.35, 0.4)):
            scores.record_epoch(epoch, accuracy=accuracy, loss=1 - accuracy)
        return scores.snapshot()

    def test_is_a_sampler(self, sampler: Sampler) -> None:
        """It has every member of the protocol."""
        assert isinstance(sampler, Sampler)

    def test_length_is_known_and_kept(self, sampler: Sampler, scores: Scores) -> None:
        """Every plan has the length that was promised, with valid ids."""
        for epoch in range(self.epoch + 4):
            plan = sampler.plan(scores, epoch)
            assert len(plan) == sampler.length_at(epoch, scores) > 0
            assert len(plan) <= sampler.longest
            assert plan.epoch == epoch
            assert plan.ids.dtype == np.uint32 and int(plan.ids.max()) < self.num_samples

    def test_plans_follow_each_other(self, sampler: Sampler, scores: Scores) -> None:
        """Global positions have neither gap nor overlap."""
        plans = [sampler.plan(scores, epoch) for epoch in range(3)]
        assert [plan.start for plan in plans] == [epoch * sampler.longest for epoch in range(3)]

    def test_is_pure(self, sampler: Sampler, scores: Scores) -> None:
        """Same arguments, same plan: in any order of calls, in a copy, in another object."""
        first = sampler.plan(scores, self.epoch)
        sampler.plan(scores, 0)
        copy, twin = pickle.loads(pickle.dumps(sampler)), self._made(self.world_size)
        for other in (sampler, copy, twin):
            again = other.plan(scores, self.epoch)
            assert again.identity == first.identity
            assert (again.weights is None) == (first.weights is None)
            if first.weights is not None and again.weights is not None:
                np.testing.assert_array_equal(again.weights, first.weights)

    def test_leaves_the_world_alone(self, sampler: Sampler, scores: Scores) -> None:
        """Neither the scores nor NumPy's global generator change."""
        np.random.seed(5)  # noqa: NPY002 - the global generator is what is being watched
        expected = np.random.random()  # noqa: NPY002
        np.random.seed(5)  # noqa: NPY002
        before = scores.values.copy()
        sampler.plan(scores, self.epoch)
        assert np.random.random() == expected  # noqa: NPY002
        np.testing.assert_array_equal(scores.values, before)

    def test_ranks_get_equal_lengths(self, sampler: Sampler, scores: Scores) -> None:
        """Together the ranks have the plan, each the same number of accesses."""
        plan = sampler.plan(scores, self.epoch)
        views = [plan.rank_view(r, self.world_size, equal=True) for r in range(self.world_size)]
        np.testing.assert_array_equal(np.stack(views, axis=1).ravel(), plan.ids)

    def test_another_number_of_ranks_goes_on_in_the_same_plan(self, scores: Scores) -> None:
        """Made for one rank it is a prefix of that for several, which repeat its start."""
        bare, shared = (self._made(n).plan(scores, self.epoch) for n in (1, self.world_size))
        positions = np.arange(len(shared)) % len(bare)
        np.testing.assert_array_equal(shared.ids, bare.ids[positions])
        assert (shared.weights is None) == (bare.weights is None)
        if shared.weights is not None and bare.weights is not None:
            np.testing.assert_array_equal(shared.weights, bare.weights[positions])

    def test_says_whether_scores_matter(self, sampler: Sampler, scores: Scores) -> None:
        """One that uses no scores plans the same with and without them."""
        if not sampler.uses_scores:
            without = sampler.plan(None, self.epoch)
            assert sampler.plan(scores, self.epoch).identity == without.identity
            assert sampler.length_at(self.epoch, scores) == sampler.length_at(self.epoch)

    def test_visits_everything_until_there_is_something_to_go_by(self, sampler: Sampler) -> None:
        """No scores, none seen yet, a scorer that is not ready: each sample, none favoured."""
        unready = Scores(self.num_samples)
        unready.update(np.arange(3), np.ones(3), step=0)
        unready.ready = False
        for scores in (None, Scores(self.num_samples), unready):
            plan = sampler.plan(scores, self.epoch)
            assert plan.weights is None
            assert len(plan) == sampler.longest
            visits = np.bincount(plan.ids, minlength=self.num_samples)
            assert visits.max() - visits.min() <= 1

    def test_refuses_a_negative_epoch(self, sampler: Sampler, scores: Scores) -> None:
        """Epochs count from 0."""
        with pytest.raises(ConfigError, match="-1"):
            sampler.plan(scores, -1)
