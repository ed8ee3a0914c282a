import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import counts, coverage, ess, repeat_share


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
