import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import Sampler, WeightedSampler
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestWeighted(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return WeightedSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestReweighted(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return WeightedSampler(self.num_samples, pad_to=pad_to, reweight=True, uniform_part=0.2)


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
