import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sampler.systematic import systematic


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
