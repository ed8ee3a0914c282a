import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import Sampler, SelectiveSampler
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestSelective(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return SelectiveSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestCut(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return SelectiveSampler(self.num_samples, pad_to=pad_to, drop_last=True, reweight=True)


def test_full_passes_first_and_every_third():
    sampler = SelectiveSampler(100)
    lengths = [sampler.length_at(epoch) for epoch in range(14)]
    assert lengths == [100] * 5 + [75, 75, 100] * 3
    assert SelectiveSampler(100, full_every=0).length_at(1000) == 75
    assert SelectiveSampler(100, full_every=1).length_at(1000) == 100


def test_the_size_is_the_sum_of_the_probabilities():
    """Without ties they are (rank / N)^beta, as in the paper, but for less than one sample."""
    scores = scores_of(np.random.default_rng(0).permutation(1000).astype(float))
    for beta in (0.1, 0.33, 1.0, 3.0):
        sampler = SelectiveSampler(1000, beta=beta, warm_up=0)
        coins = ((scores.values + 1) / 1000) ** beta
        assert abs(sampler.size(scores) - coins.sum()) <= 1
        np.testing.assert_allclose(sampler.inclusion(scores), coins, atol=0.005)


def test_hardest_samples_are_kept():
    """Public code of iCache maps losses above the 99th percentile to probability 0."""
    values = np.random.default_rng(1).lognormal(sigma=2, size=1000)
    hardest = np.argsort(values)[-3:]
    sampler = SelectiveSampler(1000, warm_up=0, full_every=0)
    visits = np.zeros(1000)
    for epoch in range(200):
        visits += np.bincount(sampler.plan(scores_of(values), epoch).ids, minlength=1000)
    assert visits[hardest[-1]] == 200
    assert visits[hardest].min() >= 195
    order = np.argsort(values)
    fifths = visits[order].reshape(5, 200).mean(axis=1)
    assert (np.diff(fifths) > 0).all(), "the harder, the more often"


def test_unseen_samples_are_kept():
    scores = scores_of(np.arange(50.0), unseen=range(10, 15))
    sampler = SelectiveSampler(50, warm_up=0)
    for epoch in (0, 1, 3):
        assert set(range(10, 15)) <= set(sampler.plan(scores, epoch).ids.tolist())


def test_the_probabilities_of_many_samples_are_those_of_each():
    """Worked out some at a time; among them are samples that are kept for certain, and ties."""
    values = np.round(np.random.default_rng(2).lognormal(size=50_000), 1)
    values[:200] = values[20_000:20_200] = values.max()
    scores = scores_of(values, unseen=range(45_000, 45_100))
    sampler = SelectiveSampler(len(values), warm_up=0)
    seen = values[scores.seen > 0]
    at_most = np.searchsorted(np.sort(seen), values, side="right") / len(seen)
    dropped = np.where(scores.seen > 0, 1 - at_most**sampler.beta, 0)
    expected = 1 - dropped * ((len(values) - sampler.size(scores)) / dropped.sum())
    np.testing.assert_allclose(sampler.inclusion(scores), expected, rtol=1e-12)
    assert (sampler.inclusion(scores)[dropped == 0] == 1).all()


def test_too_many_unseen_samples_are_drawn_evenly():
    scores = scores_of(np.arange(50.0), unseen=range(5, 50))
    inclusion = SelectiveSampler(50, warm_up=0).inclusion(scores)
    assert inclusion.sum() == pytest.approx(38)
    assert (inclusion > 0).all() and np.ptp(inclusion[5:]) == 0


def test_equal_scores_are_kept_with_equal_probability():
    inclusion = SelectiveSampler(50, warm_up=0).inclusion(scores_of(np.full(50, 2.0)))
    np.testing.assert_allclose(inclusion, 38 / 50)


def test_no_selection_at_beta_zero():
    plan = SelectiveSampler(50, beta=0, warm_up=0).plan(scores_of(np.arange(50.0)), 0)
    np.testing.assert_array_equal(np.sort(plan.ids), np.arange(50))


@given(
    values=st.lists(st.floats(0, 3), min_size=1, max_size=40),
    unseen=st.sets(st.integers(0, 39)),
    beta=st.floats(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_probabilities_fit_the_size_and_follow_the_scores(values, unseen, beta):
    n = len(values)
    unseen = [i for i in unseen if i < n]
    scores = scores_of(values, unseen=unseen)
    if len(unseen) == n:
        return
    sampler = SelectiveSampler(n, beta=beta, warm_up=0)
    inclusion = sampler.inclusion(scores)
    assert inclusion.sum() == pytest.approx(sampler.size(scores))
    assert (inclusion > 0).all() and (inclusion <= 1).all()
    seen = np.flatnonzero(scores.seen)
    assert (np.diff(inclusion[seen][np.argsort(scores.values[seen])]) >= -1e-12).all()


def test_a_scorer_that_is_not_ready_gets_full_passes():
    scores = scores_of(np.arange(50.0))
    sampler = SelectiveSampler(50, warm_up=0)
    assert sampler.length_at(0, scores) == 38
    from stoker.scores import Scores

    waiting = Scores(50)
    waiting.update(np.arange(50), np.arange(50.0), 0)
    waiting.ready = False
    assert sampler.length_at(0, waiting) == len(sampler.plan(waiting, 0)) == 50


def test_inclusion_follows_the_probabilities():
    """4,000 epochs: the frequency of each sample within five standard errors."""
    scores = scores_of(np.arange(20.0))
    sampler = SelectiveSampler(20, warm_up=0, full_every=0, seed=5)
    visits = sum(np.bincount(sampler.plan(scores, e).ids, minlength=20) for e in range(4000))
    p = sampler.inclusion(scores)
    error = np.sqrt(p * (1 - p) / 4000)
    assert (np.abs(visits / 4000 - p) <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("name", ["beta", "warm_up", "full_every"])
def test_refuses_bad_arguments(name):
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        SelectiveSampler(10, **{name: -1})
