import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import Sampler, WeightedSampler
from stoker.sampler.baselines import capped
from stoker.scores import Scores
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestWeighted(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return WeightedSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestReweighted(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return WeightedSampler(self.num_samples, pad_to=pad_to, reweight=True, uniform_part=0.2)


class TestDistinct(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return WeightedSampler(self.num_samples, pad_to=pad_to, draws=41, replacement=False)


def test_more_draws_than_samples():
    sampler = WeightedSampler(103, pad_to=4, draws=250)
    assert sampler.longest == 252
    plan = sampler.plan(scores_of(np.arange(103)), 0)
    assert len(plan) == sampler.length_at(0) == 252
    plan = sampler.plan(None, 1)
    assert (plan.start, len(plan)) == (252, sampler.length_at(1, Scores(103))) == (252, 104)


@given(
    p=st.lists(st.integers(0, 50), min_size=2, max_size=30).filter(any),
    data=st.data(),
)
def test_inclusion_probabilities_sum_to_the_draws(p, data):
    p = np.array(p) / sum(p)
    size = data.draw(st.integers(1, len(p) - 1))
    found = capped(p, size)
    assert found.sum() == pytest.approx(size)
    assert (found >= 0).all() and (found <= 1).all()
    open_ones = (found < 1) & (p > 0)
    ratios = found[open_ones] / p[open_ones]
    np.testing.assert_allclose(ratios, ratios[:1].repeat(len(ratios)))
    # What is certain has no smaller p than what is not.
    if open_ones.any() and (found == 1).any():
        assert p[found == 1].min() >= p[open_ones].max()


def test_without_replacement_each_comes_once_and_as_often_as_it_should():
    scores = scores_of([1, 2, 3, 4, 10, 0])
    sampler = WeightedSampler(6, seed=2, draws=3, replacement=False)
    plans = [sampler.plan(scores, e).ids for e in range(4000)]
    assert all(len(np.unique(plan)) == 3 for plan in plans)
    share = np.bincount(np.concatenate(plans), minlength=6) / len(plans)
    np.testing.assert_allclose(share, [0.2, 0.4, 0.6, 0.8, 1, 0], atol=0.03)


def test_draws_in_proportion_to_scores():
    """100 epochs against the multinomial they come from: chi-squared, 3 degrees of freedom."""
    scores = scores_of([1, 2, 3, 4])
    sampler = WeightedSampler(4, seed=2)
    drawn = np.bincount(
        np.concatenate([sampler.plan(scores, e).ids for e in range(2500)]), minlength=4
    )
    expected = 10_000 * np.array([0.1, 0.2, 0.3, 0.4])
    assert float(((drawn - expected) ** 2 / expected).sum()) < 16.3  # p = 0.001


def test_unseen_samples_score_as_the_median():
    p = WeightedSampler(5).probabilities(scores_of([1, 2, 6, 0, 0], unseen=[3, 4]))
    np.testing.assert_allclose(p, np.array([1, 2, 6, 2, 2]) / 13)


def test_nothing_is_drawn_more_rarely_than_the_uniform_part():
    sampler = WeightedSampler(4, uniform_part=0.2, reweight=True)
    scores = scores_of([0, 0, 0, 9])
    np.testing.assert_allclose(sampler.probabilities(scores), [0.05, 0.05, 0.05, 0.85])
    weights = np.concatenate([sampler.plan(scores, e).weights for e in range(50)])
    assert weights.max() <= 5.0001
    np.testing.assert_allclose(np.unique(weights), [1 / (4 * 0.85), 5], rtol=1e-6)


def test_refuses_weights_that_cannot_be_made():
    with pytest.raises(ConfigError, match="needs a uniform part"):
        WeightedSampler(4, reweight=True)
    with pytest.raises(ConfigError, match=r"uniform_part=1\.5"):
        WeightedSampler(4, uniform_part=1.5)
    with pytest.raises(ConfigError, match="draws=0"):
        WeightedSampler(4, draws=0)
    for draws in (None, 4, 5):
        with pytest.raises(ConfigError, match="give fewer draws, or replacement=True"):
            WeightedSampler(4, draws=draws, replacement=False)
