import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import ImportanceSampler, Sampler, ess
from stoker.scores import Scores
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestImportance(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return ImportanceSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestAnnealed(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return ImportanceSampler(self.num_samples, pad_to=pad_to, epochs=7)


@given(
    scores=st.lists(st.floats(0, 1e6), min_size=2, max_size=60),
    min_ess=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
)
def test_visits_stay_within_one_of_what_is_expected(scores, min_ess, seed):
    sampler = ImportanceSampler(len(scores), seed, min_ess=min_ess, repeat=1)
    plan = sampler.plan(scores_of(scores), 1)
    visits = sampler.visits(np.array(scores))
    counts = np.bincount(plan.ids, minlength=len(scores))
    assert visits.sum() == pytest.approx(len(scores))
    assert (np.abs(counts - visits) < 1 + 1e-6).all()
    # 1/e bounds the weights, whatever the scores.
    assert plan.weights.max() <= 5 + 1e-4
    np.testing.assert_allclose(plan.weights, 1 / visits[plan.ids], rtol=1e-5)


@pytest.mark.parametrize("min_ess", [0.0, 0.5, 0.7, 0.9])
def test_the_effective_sample_size_has_a_floor(min_ess):
    scores = scores_of(np.random.default_rng(3).lognormal(0, 3, 5000))
    sampler = ImportanceSampler(5000, min_ess=min_ess, uniform_part=0.01, clip=1.0)
    found = np.mean([ess(w) / len(w) for w in _weights(sampler, scores)])
    assert found >= min_ess - 0.02
    if min_ess:  # and is not given more of the uniform part than that takes
        assert found <= min_ess + 0.02


def test_wrong_labels_do_not_take_the_epoch():
    losses = np.ones(1000)
    losses[:10] = 1e4
    visits = ImportanceSampler(1000).visits(losses)
    np.testing.assert_allclose(visits, 1, rtol=1e-6)
    assert ImportanceSampler(1000, clip=1.0).visits(losses)[:10].sum() > 100


def test_the_end_is_full_passes_that_are_foreseen():
    sampler = ImportanceSampler(50, epochs=16)
    scores = scores_of(np.arange(50.0))
    for epoch in range(16):
        is_full = len(set(sampler.plan(scores, epoch).ids.tolist())) == 50
        assert is_full == (epoch >= 14) == sampler.foresees(scores, epoch)
    assert sampler.plan(scores, 15).weights is None


def test_says_when_samples_are_to_be_expected_again():
    scores = scores_of(np.linspace(0.1, 2, 200))
    sampler = ImportanceSampler(200)
    plan = sampler.plan(scores, 1)
    np.testing.assert_allclose(plan.beyond, 200 / sampler.visits(scores.values), rtol=1e-5)


def test_several_epochs_are_drawn_at_once():
    rng = np.random.default_rng(4)
    sampler, scores = ImportanceSampler(300, seed=2, repeat=4), scores_live(rng.lognormal(size=300))
    plans = []
    for epoch in range(4, 8):
        sampler.begin_epoch(scores, epoch)
        assert sampler.foresees(scores, 5) and not sampler.foresees(scores, 8)
        plans.append(sampler.plan(scores.snapshot(), epoch))
        if epoch < 7:  # the next one is what it will be, whatever is scored until then
            coming = sampler.plan(scores.snapshot(), epoch + 1)
            scores.update(np.arange(300), rng.lognormal(size=300), step=epoch)
            assert coming.identity == sampler.plan(scores.snapshot(), epoch + 1).identity
    visits = sampler.visits(scores.basis.astype(np.float64))
    counts = np.bincount(np.concatenate([plan.ids for plan in plans]), minlength=300)
    assert (np.abs(counts - 4 * visits) < 1 + 1e-4).all()
    sampler.begin_epoch(scores, 8)
    assert scores.basis_epoch == 8


def test_a_plan_is_the_same_whether_its_basis_is_kept_or_not():
    sampler, scores = ImportanceSampler(300, repeat=4), scores_live(np.arange(300) / 7)
    before = sampler.plan(scores.snapshot(), 6).identity
    sampler.begin_epoch(scores, 6)
    assert sampler.plan(scores.snapshot(), 6).identity == before
    again = Scores(300)
    again.restore(**scores.arrays())
    again.update([5], [1e9], step=9)
    assert sampler.plan(again.snapshot(), 7).identity == sampler.plan(scores, 7).identity


@pytest.mark.parametrize(
    "wrong",
    [
        {"uniform_part": 0},
        {"uniform_part": 1.1},
        {"min_ess": 1.0},
        {"clip": 0},
        {"annealed": -1},
        {"repeat": 0},
    ],
)
def test_refuses_shares_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ImportanceSampler(10, **wrong)


def scores_live(values):
    scores = Scores(len(values))
    scores.update(np.arange(len(values)), values, step=0)
    return scores


def _weights(sampler, scores):
    return [sampler.plan(scores, epoch).weights for epoch in range(1, 6)]
