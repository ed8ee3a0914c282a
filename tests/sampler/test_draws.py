import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import counts, coverage, ess, repeat_share
from stoker.sampler.draws import (
    generator,
    multinomial,
    repeated_in_random_order,
    scores_or_median,
    shuffle,
    systematic,
    systematic_visits,
)
from stoker.scores import Scores


@given(
    size=st.integers(0, 300),
    dtype=st.sampled_from([np.bool_, np.uint8, np.uint32, np.int64, np.float64]),
    seed=st.integers(0, 2**32),
    drawn=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_shuffles_as_numpy_does(size, dtype, seed, drawn):
    own, other = generator(seed, 5), generator(seed, 5)
    for rng in (own, other):
        rng.random(drawn, np.float32)  # half a word may be left over
    items = np.arange(size).astype(dtype)
    expected = items.copy()
    shuffle(items, own)
    other.shuffle(expected)
    assert items.tolist() == expected.tolist()
    assert own.random() == other.random()


def test_a_sample_not_seen_has_the_median_of_the_scores():
    scores = Scores(5)
    scores.update([0, 1, 4], [5.0, -1.0, 2.0], step=0)
    assert scores_or_median(scores).tolist() == [5.0, 0.0, 2.0, 2.0, 2.0]
    assert scores_or_median(Scores(3)).tolist() == [1.0] * 3  # none was seen
    assert scores.values.tolist() == [5.0, -1.0, 0.0, 0.0, 2.0]


def test_shuffles_a_part_in_place():
    items = np.arange(1000, dtype=np.uint32)
    shuffle(items[:100], generator(0, 0))
    assert sorted(items[:100]) == list(range(100)) != items[:100].tolist()
    assert items[100:].tolist() == list(range(100, 1000))


def test_refuses_to_shuffle_what_it_cannot():
    with pytest.raises(ConfigError):
        shuffle(np.zeros(3, np.int16), generator(0, 0))
    fixed = np.zeros(3, np.uint32)
    fixed.flags.writeable = False
    with pytest.raises(TypeError):
        shuffle(fixed, generator(0, 0))


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=600),
    power=st.integers(1, 8),
    size=st.integers(0, 3000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_draws_counts_as_numpy_does(weights, power, size, seed):
    p = np.array(weights) ** power
    if not p.sum() > 0:
        return
    p /= p.sum()
    own, other = generator(seed, 5), generator(seed, 5)
    found, expected = multinomial(size, p, own), other.multinomial(size, p)
    assert found.dtype == np.uint32
    assert found.tolist() == expected.tolist()
    assert own.random() == other.random()


@pytest.mark.parametrize(
    "p",
    [
        [1e-4, 0.9999],  # the last takes what is left
        [0.9999, 1e-4],  # drawn by its failures
        [0.4, 0.6],  # expected so often that NumPy draws it otherwise
        [1 / 2000] * 1999 + [1 / 2000],
    ],
)
def test_draws_many_or_few_as_numpy_does(p):
    own, other = generator(3, 0), generator(3, 0)
    assert multinomial(1000, np.array(p), own).tolist() == other.multinomial(1000, p).tolist()
    assert own.random() == other.random()


def test_repeats_as_often_as_counted():
    ids = repeated_in_random_order(np.array([2, 0, 3], np.uint32), generator(0, 0)).array
    assert sorted(ids.tolist()) == [0, 0, 2, 2, 2]
    assert counts(ids, 3).tolist() == [2, 0, 3]


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=50),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_takes_exactly_so_many_distinct_ones(shares, seed):
    inclusion = np.array(shares)
    size = int(inclusion.sum())
    if size == 0 or inclusion.max() == 0:
        return
    inclusion *= size / inclusion.sum()  # at most what they were, so none above 1
    taken = systematic(inclusion, size, np.random.default_rng(seed))
    assert len(taken) == len(np.unique(taken)) == size
    assert (inclusion[taken] > 0).all()
    assert np.isin(np.flatnonzero(inclusion >= 1), taken).all()


def test_nothing_between_never_and_always():
    taken = systematic(np.array([0.0, 1, 0, 1]), 2, np.random.default_rng(0))
    assert sorted(taken.tolist()) == [1, 3]


def test_the_order_is_random():
    orders = {
        tuple(systematic(np.array([1.0, 0.5, 0.5]), 2, np.random.default_rng(s)).tolist())
        for s in range(50)
    }
    assert orders == {(0, 1), (1, 0), (0, 2), (2, 0)}


@given(
    visits=st.lists(st.floats(0, 9), min_size=1, max_size=50),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_visits_are_rounded_down_or_up(visits, seed):
    visits = np.array(visits)
    total = round(float(visits.sum()))
    if total == 0:
        return
    visits *= total / visits.sum()
    counts = np.bincount(systematic_visits(visits, np.random.default_rng(seed)))
    counts = np.pad(counts, (0, len(visits) - len(counts)))
    assert counts.sum() == total
    assert (np.abs(counts - visits) < 1 + 1e-9).all()


@pytest.mark.parametrize("since", [0, 1, 300, 1199, 1200])
def test_the_last_visits_are_those_of_all(since):
    visits = np.random.default_rng(1).dirichlet(np.ones(300)) * 300
    whole = systematic_visits(visits, generator(0, 0), 4)
    part = systematic_visits(visits, generator(0, 0), 4, since)
    assert len(whole) == 1200
    assert part.tolist() == whole[since:].tolist()


def test_visits_have_their_mean():
    visits = np.array([0.3, 2.7, 1.0, 0.0])
    counts = [
        np.bincount(systematic_visits(visits, np.random.default_rng(s)), minlength=4)
        for s in range(2000)
    ]
    np.testing.assert_allclose(np.mean(counts, axis=0), visits, atol=0.05)


def test_a_full_epoch():
    n = counts(np.random.default_rng(0).permutation(50), 50)
    assert (ess(n), coverage(n), repeat_share(n)) == (50, 1, 0)


def test_one_sample_only():
    n = counts([7] * 10, 50)
    assert (ess(n), coverage(n), repeat_share(n)) == (1, 1 / 50, 0.9)


def test_worked_example():
    n = counts([0, 0, 0, 1, 2], 4)
    assert ess(n) == pytest.approx(25 / 11)
    assert (coverage(n), repeat_share(n)) == (0.75, pytest.approx(0.4))


def test_nothing():
    n = counts([], 5)
    assert (ess(n), coverage(n), repeat_share(n)) == (0, 0, 0)
    assert coverage([]) == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_ess_lies_between_one_and_the_number(weights):
    if any(w > 1e-3 for w in weights):
        assert 1 - 1e-9 <= ess(weights) <= len(weights) * (1 + 1e-9)


def test_draws_with_replacement_know_their_ess():
    """Poisson counts: (sum n)^2 / sum n^2 is N/2 for uniform draws."""
    n = np.random.default_rng(0).multinomial(100_000, np.full(100_000, 1e-5))
    assert ess(n) / 100_000 == pytest.approx(0.5, abs=0.005)


def test_refuses_ids_out_of_range():
    with pytest.raises(ConfigError, match="9"):
        counts([1, 9], 5)
