import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sampler.draws import systematic, systematic_visits


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


def test_visits_have_their_mean():
    visits = np.array([0.3, 2.7, 1.0, 0.0])
    counts = [
        np.bincount(systematic_visits(visits, np.random.default_rng(s)), minlength=4)
        for s in range(2000)
    ]
    np.testing.assert_allclose(np.mean(counts, axis=0), visits, atol=0.05)
