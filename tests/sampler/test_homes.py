"""Homes are random, even, stable, and move a few at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler.homes import DURATION, NOBODY, Homes

N = 20_000


def test_nodes_are_home_to_equally_many():
    homes = Homes(N, 4).at(0)
    assert homes.dtype == np.int16
    counts = np.bincount(homes, minlength=4)
    assert float(((counts - N / 4) ** 2 / (N / 4)).sum()) < 16.3  # chi-squared, p = 0.001


def test_homes_are_pure_and_differ_by_seed():
    np.testing.assert_array_equal(Homes(N, 4, 1).at(9), Homes(N, 4, 1).at(9))
    assert (Homes(N, 4, 1).at(9) == Homes(N, 4, 2).at(9)).mean() < 0.3


def test_a_few_are_drawn_anew_each_epoch_and_all_in_time():
    homes = Homes(N, 2)
    rows = np.array([homes.at(epoch) for epoch in range(2 * DURATION)])
    moved = (rows[1:] != rows[:-1]).mean(axis=1)
    # Half of those that are drawn anew stay where they are.
    np.testing.assert_allclose(moved, 0.5 / DURATION, atol=0.003)
    assert abs((rows[0] == rows[DURATION]).mean() - 0.5) < 0.02
    # Two that lived together part like strangers.
    together = rows[0][:-1] == rows[0][1:]
    later = rows[DURATION][:-1] == rows[DURATION][1:]
    assert abs(later[together].mean() - 0.5) < 0.03


def test_another_node_takes_only_its_own():
    for epoch in (0, 17):
        three, four = Homes(N, 3).at(epoch), Homes(N, 4).at(epoch)
        changed = three != four
        assert (four[changed] == 3).all()
        assert abs(changed.mean() - 0.25) < 0.02


@settings(max_examples=50, deadline=None)
@given(
    num_nodes=st.integers(1, 5),
    share=st.floats(0, 1.5),
    epoch=st.integers(0, 200),
    seed=st.integers(0, 99),
)
def test_only_what_fits_has_a_home(num_nodes, share, epoch, seed):
    sizes = np.random.default_rng(seed).integers(1, 100, 500)
    capacity = int(share * sizes.sum())
    everyone = Homes(500, num_nodes, seed).at(epoch)
    found = Homes(500, num_nodes, seed, sizes, capacity).at(epoch)
    has_one = found != NOBODY
    np.testing.assert_array_equal(found[has_one], everyone[has_one])
    for node in range(num_nodes):
        held = sizes[found == node].sum()
        wanted = sizes[everyone == node].sum()
        assert held <= capacity
        assert held == wanted or held > capacity - 100, "as much as fits"


def test_what_fits_hardly_changes_between_epochs():
    sizes = np.full(N, 10)
    homes = Homes(N, 2, 0, sizes, 2 * N)
    rows = np.array([homes.at(epoch) for epoch in range(40)])
    kept = [(a[a >= 0] == b[a >= 0]).mean() for a, b in itertools.pairwise(rows)]
    assert min(kept) > 1 - 1.5 / DURATION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "num_nodes": 1}, "num_samples=0"),
        ({"num_samples": 5, "num_nodes": 0}, "num_nodes=0"),
        ({"num_samples": 5, "num_nodes": 1, "capacity": 7}, "give sizes"),
        ({"num_samples": 5, "num_nodes": 1, "capacity": -1}, "capacity=-1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Homes(**arguments)
    with pytest.raises(ConfigError, match="epoch=-"):
        Homes(5, 2).at(-1)
