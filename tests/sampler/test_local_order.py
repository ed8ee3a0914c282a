"""Ranks take the samples whose home they are, and steps stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler.homes import local_order


def one_by_one(homes, nodes, batch):
    """The same for a single step, said plainly."""
    size, world_size = len(homes), len(nodes)
    taken = [None] * size
    left = []
    for access, home in enumerate(homes):
        free = [p for p in range(size) if taken[p] is None and nodes[p % world_size] == home]
        if free:
            taken[free[0]] = access
        else:
            left.append(access)
    for place in range(size):
        if taken[place] is None:
            taken[place] = left.pop(0)
    return taken


@settings(max_examples=200, deadline=None)
@given(
    homes=st.lists(st.integers(-1, 4), max_size=60),
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    batch=st.integers(1, 4),
)
def test_as_one_by_one_and_step_by_step(homes, nodes, batch):
    found = local_order(np.array(homes, np.int16), np.array(nodes), batch)
    step = len(nodes) * batch
    expected = []
    for begin in range(0, len(homes), step):
        part = one_by_one(homes[begin : begin + step], nodes, batch)
        expected += [begin + access for access in part]
    assert found.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(0, 200),
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    batch=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_steps_keep_their_samples_and_locality_is_the_most_there_can_be(count, nodes, batch, seed):
    homes = np.random.default_rng(seed).integers(-1, 4, count)
    nodes = np.array(nodes)
    found = local_order(homes, nodes, batch)
    world_size, step = len(nodes), len(nodes) * batch
    for begin in range(0, count, step):
        end = min(begin + step, count)
        assert sorted(found[begin:end]) == list(range(begin, end))
        where = nodes[np.arange(begin, end) % world_size]
        local = int((homes[found[begin:end]] == where).sum())
        room = np.bincount(where, minlength=4)
        there = np.bincount(homes[begin:end][homes[begin:end] >= 0], minlength=4)
        assert local == np.minimum(room, there).sum()


def test_one_node_changes_nothing():
    homes = np.zeros(100, np.int16)
    np.testing.assert_array_equal(local_order(homes, np.zeros(3, np.int64), 4), np.arange(100))


def test_large_plans():
    homes = np.random.default_rng(0).integers(0, 4, 100_000)
    nodes = np.repeat(np.arange(4), 2)
    found = local_order(homes, nodes, 64)
    assert sorted(found) == list(range(100_000))
    local = homes[found] == nodes[np.arange(100_000) % 8]
    # Of 512 in a step, 4 nodes: what is over the room of a node is 3 % in the mean.
    assert 0.96 < local.mean() < 0.98


@pytest.mark.parametrize(("nodes", "batch"), [([], 1), ([0, -1], 1), ([0], 0)])
def test_refusals(nodes, batch):
    with pytest.raises(ConfigError, match="are out of range"):
        local_order(np.zeros(4, np.int16), np.array(nodes, np.int64), batch)
