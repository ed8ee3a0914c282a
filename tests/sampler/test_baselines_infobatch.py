import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import InfoBatchSampler, Sampler
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestMean(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return InfoBatchSampler(self.num_samples, seed=7, pad_to=pad_to, epochs=8)


class TestFixedSize(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return InfoBatchSampler(
            self.num_samples, pad_to=pad_to, epochs=8, easiest=0.5, drop_last=True
        )


def test_half_of_those_below_the_mean_are_left_out_and_the_others_count_twice():
    values = np.array([0.0] * 60 + [1.0] * 40)  # mean 0.4
    sampler = InfoBatchSampler(100, epochs=100)
    plan = sampler.plan(scores_of(values), 3)
    assert len(plan) == 70 == sampler.length_at(3, scores_of(values))
    np.testing.assert_array_equal(plan.weights, np.where(values[plan.ids] < 0.4, 2, 1))
    assert set(range(60, 100)) <= set(plan.ids.tolist())


def test_weights_are_the_exact_ratio():
    values = np.array([0.0] * 7 + [1.0] * 13)  # half of 7, rounded down: 3 left out of 7
    plan = InfoBatchSampler(20, epochs=100).plan(scores_of(values), 3)
    assert len(plan) == 17
    np.testing.assert_allclose(plan.weights[values[plan.ids] == 0], 7 / 4, rtol=1e-6)
    assert plan.weights.sum() == pytest.approx(20)


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 7, 8, 10, 11, 30, 200])
def test_weights_reset_at_anneal(epochs):
    """For any number of epochs: public code resets them only if delta x epochs is whole."""
    sampler = InfoBatchSampler(40, epochs=epochs)
    scores = scores_of(np.arange(40.0))
    full = [e for e in range(epochs + 2) if sampler.plan(scores, e).weights is None]
    assert full == list(range(full[0], epochs + 2)), "once full, full to the end and beyond"
    assert epochs - full[0] >= max(1, 0.125 * epochs)
    assert epochs - full[0] < 0.125 * epochs + 1
    for epoch in full:
        np.testing.assert_array_equal(np.sort(sampler.plan(scores, epoch).ids), np.arange(40))


def test_unseen_samples_are_never_left_out():
    scores = scores_of(np.ones(30), unseen=range(20, 30))
    plan = InfoBatchSampler(30, epochs=100).plan(scores, 1)
    assert set(range(20, 30)) <= set(plan.ids.tolist())


def test_equal_losses_are_all_visited():
    """The mean of equal numbers may round to above them; none counts as below it all the same."""
    plan = InfoBatchSampler(10, epochs=100).plan(scores_of(np.full(10, 0.1)), 1)
    assert len(plan) == 10


def test_without_scores_no_fewer_steps_are_planned_than_taken():
    sampler = InfoBatchSampler(100, epochs=100)
    assert sampler.length_at(3) == 100
    assert sampler.length_at(3, scores_of(np.arange(100.0))) == 75


def test_a_fixed_share_has_a_fixed_length():
    sampler = InfoBatchSampler(100, epochs=100, easiest=0.6)
    for values in (np.arange(100.0), np.ones(100), np.arange(100.0) ** 5):
        scores = scores_of(values, unseen=range(90))
        assert len(sampler.plan(scores, 3)) == sampler.length_at(3) == 70
    plan = sampler.plan(scores_of(np.arange(100.0)), 3)
    np.testing.assert_array_equal(plan.weights, np.where(plan.ids < 60, 2, 1))


def test_must_know_how_many_epochs_there_are():
    with pytest.raises(ConfigError, match="give the Loader epochs="):
        InfoBatchSampler(10)
    assert InfoBatchSampler(10, delta=1).length_at(10**6, scores_of([0] * 6 + [1] * 4)) == 7


@pytest.mark.parametrize("name", ["prune", "delta", "easiest"])
def test_refuses_bad_arguments(name):
    with pytest.raises(ConfigError, match=f"{name}=1.5"):
        InfoBatchSampler(10, epochs=3, **{name: 1.5})
