import math

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.sampler import PadsSampler, Sampler, counts, coverage, repeat_share
from stoker.sampler.pads import spread
from stoker.testing.sampler_conformance import SamplerConformance
from tests.sampler.parts import scores_of


class TestAdaptive(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return PadsSampler(self.num_samples, seed=7, pad_to=pad_to)


class TestHitsFirst(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return PadsSampler(self.num_samples, seed=7, pad_to=pad_to, order="hits_first")


class TestFixed(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        return PadsSampler(self.num_samples, seed=7, pad_to=pad_to, repetition=3)


def log_ranks(num_samples: int, batch: int = 128, b0: int = 10) -> np.ndarray:
    return np.log(np.arange(num_samples) % batch + b0)


def factors(accuracies, losses=None, **more):
    """Return the factor of each epoch from 0 to one past the end."""
    scores = scores_of(np.ones(3), accuracies=accuracies, losses=losses)
    sampler = PadsSampler(3, **more)
    return [sampler.factor(scores, epoch) for epoch in range(len(accuracies) + 1)]


def test_the_factor_rises_while_accuracy_grows_and_stops_at_three():
    assert factors([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]) == [1, 1, 1.5, 2, 2.5, 3, 3, 3]


def test_the_mean_of_the_last_three_changes_decides():
    # Changes .2 .1 -.05 -.04 -.3: means .2 .15 .083 .003 -.13
    assert factors([0.3, 0.5, 0.6, 0.55, 0.51, 0.21]) == [1, 1, 1.5, 2, 2.5, 3, 2.5]


def test_stagnation_leads_back_towards_uniform():
    assert factors([0.3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]) == [1, 1, 1.5, 2, 2.5, 2, 1.5, 1]


def test_a_steep_fall_of_the_loss_leads_back_towards_uniform():
    assert factors([0.1, 0.2, 0.3, 0.4], [2.0, 1.9, 1.0, 0.9]) == [1, 1, 1.5, 1, 1.5]


def test_epochs_without_accuracy_leave_the_factor_alone():
    nan = math.nan
    assert factors([nan, nan, nan]) == [1, 1, 1, 1]
    assert factors([0.1, nan, 0.2, nan, 0.3]) == [1, 1, 1, 1.5, 1.5, 2]


def test_the_factor_of_an_epoch_ignores_what_came_later():
    long = scores_of(np.ones(3), accuracies=[0.1, 0.2, 0.3, 0.1, 0.0])
    short = scores_of(np.ones(3), accuracies=[0.1, 0.2, 0.3])
    assert PadsSampler(3).factor(long, 3) == PadsSampler(3).factor(short, 3) == 2


def test_the_top_fifth_by_log_rank_holds_a_quarter_of_the_mass_and_three_times_that_is_most():
    """Arithmetic, not a figure of the paper: .233, and the .70 that the public code makes of it."""
    scores = scores_of(log_ranks(12_800))
    rng = np.random.default_rng(0)
    top = np.argsort(scores.values)[-2560:]
    for repetition, mass in ((1, 0.233), (3, 0.70)):
        p = PadsSampler(12_800, repetition=repetition).probabilities(scores, 3, rng)
        assert p[top].sum() == pytest.approx(mass, abs=0.005)
        assert p.sum() == pytest.approx(1)


def test_the_mass_of_the_important_ends_at_one():
    sampler = PadsSampler(100, repetition=3, important=0.5)
    p = sampler.probabilities(scores_of(np.arange(100.0)), 1, np.random.default_rng(0))
    assert p[50:].sum() == pytest.approx(1) and p[:50].sum() == 0


def test_everything_important_is_the_plain_multinomial():
    scores = scores_of(np.arange(1.0, 11))
    p = PadsSampler(10, repetition=3, important=1).probabilities(
        scores, 1, np.random.default_rng(0)
    )
    np.testing.assert_allclose(p, np.arange(1, 11) / 55)


def test_repetition_costs_coverage():
    scores = scores_of(log_ranks(5000))
    mild, strong = (
        counts(PadsSampler(5000, repetition=r).plan(scores, 2).ids, 5000) for r in (1, 3)
    )
    assert coverage(strong) < coverage(mild) < 0.64
    assert repeat_share(strong) > repeat_share(mild)


def test_repeats_are_spread_over_the_epoch():
    """Three copies among 300 accesses lie about a hundred apart, never next to each other."""
    rng = np.random.default_rng(4)
    each = np.zeros(500, np.int64)
    each[:60], each[60:180] = 3, 1
    ids = spread(each, rng)
    np.testing.assert_array_equal(np.bincount(ids, minlength=500), each)
    gaps = np.concatenate([np.diff(np.flatnonzero(ids == i)) for i in range(60)])
    assert gaps.min() > 70 and gaps.max() < 130


def test_spread_has_no_favourite_place():
    """The first place of a sample with n copies is uniform over the first n-th."""
    each = np.array([2, 1, 1, 2, 2, 2])
    first = np.zeros(6)
    for seed in range(3000):
        first[spread(each, np.random.default_rng(seed))[0]] += 1
    expected = 3000 * each / each.sum()
    assert float(((first - expected) ** 2 / expected).sum()) < 20.5  # p = 0.001


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"repetition": 0.5}, "repetition=0.5"),
        ({"important": 0}, "important=0"),
        ({"low": 2, "high": 1}, "low=2, high=1"),
        ({"step": 0}, "step=0"),
        ({"window": 0}, "window=0"),
        ({"steep": 2}, "steep=2"),
    ],
)
def test_refuses_bad_arguments(arguments, named):
    with pytest.raises(ConfigError, match=named):
        PadsSampler(10, **arguments)


@pytest.mark.parametrize(
    "idle", [{"low": 2}, {"high": 4}, {"step": 1}, {"window": 5, "steep": 0.5}]
)
def test_s15_what_moves_the_factor_is_refused_beside_a_fixed_one(idle):
    with pytest.raises(ConfigError, match="has no effect with repetition=3"):
        PadsSampler(10, repetition=3, **idle)
    PadsSampler(10, **idle)


def test_hits_first_has_the_same_accesses_with_all_important_ones_before_the_others():
    scores = scores_of(log_ranks(1000))
    fixed = {"seed": 3, "repetition": 3, "important": 0.2}
    plain = PadsSampler(1000, **fixed).plan(scores, 1)
    plan = PadsSampler(1000, **fixed, order="hits_first").plan(scores, 1)
    assert sorted(plan.ids) == sorted(plain.ids) and plan.ids.tolist() != plain.ids.tolist()
    edge = np.flatnonzero(scores.values[plan.ids] < np.quantile(scores.values, 0.79))[0]
    assert 0.65 < edge / 1000 < 0.75, "3 x .233 of the accesses"
    assert scores.values[plan.ids[:edge]].min() >= scores.values[plan.ids[edge:]].max()


def test_smoothing_follows_the_loss_as_in_the_public_code():
    scores = scores_of(np.array([1.0, 3.0]), accuracies=[math.nan] * 3, losses=[2.0, 1.0, 1.5])
    sampler, rng = PadsSampler(2, smoothing=0.01), np.random.default_rng(0)
    added = 0.02
    for epoch, change in enumerate((0.0, -0.5, 0.5), start=1):
        added *= math.exp(change)
        found = sampler.probabilities(scores, epoch, rng)
        np.testing.assert_allclose(found, (np.array([1, 3]) + added) / (4 + 2 * added))
    np.testing.assert_allclose(PadsSampler(2).probabilities(scores, 3, rng), [0.25, 0.75])


@pytest.mark.parametrize("wrong", [{"order": "misses_first"}, {"smoothing": -0.1}])
def test_unknown_orders_and_negative_smoothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PadsSampler(10, **wrong)
