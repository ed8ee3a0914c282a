"""Best fit decreasing: the bins of the textbook, and none too full."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.sampler.best_fit import best_fit


def textbook(lengths: list[int], capacity: int) -> list[int]:
    """Return what is in each bin, by a search through all of them; sorted."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, full in enumerate(bins) if full + length <= capacity]
        if fitting:
            bins[max(fitting, key=lambda place: bins[place])] += length
        else:
            bins.append(length)
    return sorted(bins)


@given(st.integers(1, 70).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
def test_the_bins_are_those_of_the_textbook(given: tuple[int, list[int]]) -> None:
    capacity, lengths = given
    bins = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(bins, np.array(lengths, np.int64)) if lengths else np.empty(0)
    assert sorted(filled.astype(int).tolist()) == textbook(lengths, capacity)
