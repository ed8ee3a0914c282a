"""Blocks: each sample once, whole blocks for a rank, windows of the length that was given."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.sampler import BlockSampler, Sampler, UniformSampler, neighbour_distances
from stoker.sampler.blocks import block_starts, fit_window
from stoker.sampler.super_epochs import Room
from stoker.testing.sampler_conformance import SamplerConformance


class TestConformance(SamplerConformance):
    def make_sampler(self, pad_to: int) -> Sampler:
        breaks = np.array([10, 57])
        return BlockSampler(self.num_samples, 7, pad_to=pad_to, block=8, breaks=breaks)


@st.composite
def samplers(draw) -> BlockSampler:
    count = draw(st.integers(1, 2000))
    return BlockSampler(
        count,
        seed=draw(st.integers(0, 2**64 - 1)),
        pad_to=draw(st.integers(1, 9)),
        block=draw(st.integers(2, 50)),
        window=draw(st.floats(0.001, 1.0)),
        breaks=np.array(sorted(draw(st.sets(st.integers(0, count - 1)))), np.int64),
    )


@given(samplers(), st.integers(0, 5))
def test_each_sample_once_in_each_epoch_and_any_epoch_alone(sampler, epoch) -> None:
    count, plan = sampler.num_samples, sampler.plan(None, epoch)
    assert sorted(plan.ids[:count].tolist()) == list(range(count))
    assert len(plan) == sampler.longest and len(plan) % sampler.pad_to == 0
    again = pickle.loads(pickle.dumps(sampler))
    again.plan(None, epoch + 1)
    assert again.plan(None, epoch).identity == plan.identity


@given(samplers())
def test_a_block_is_of_adjacent_samples_without_a_break(sampler) -> None:
    count, plan = sampler.num_samples, sampler.plan(None, 0)
    of = np.empty(count, np.int64)
    of[plan.ids] = plan.blocks
    starts = np.flatnonzero(np.diff(of, prepend=-1))
    assert starts.tolist() == block_starts(count, sampler.block, sampler.breaks).tolist()
    assert np.diff(starts, append=count).max() <= sampler.block
    assert set(sampler.breaks.tolist()) <= set(starts.tolist())
    assert len(np.unique(of)) == len(starts)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_get_whole_blocks(ranks: int) -> None:
    """But for those that lanes end with."""
    sampler = BlockSampler(50_000, 1, block=32, window=0.2, pad_to=ranks)
    plan = sampler.plan(None, 2)
    parts = [np.unique(plan.blocks[rank::ranks]) for rank in range(ranks)]
    assert len({len(plan.rank_view(rank, ranks, equal=True)) for rank in range(ranks)}) == 1
    whole = -(-50_000 // 32)
    assert sum(map(len, parts)) <= whole + sampler.lanes + ranks


@pytest.mark.parametrize("window", [0.05, 0.2, 0.5])
def test_samples_of_a_block_fall_into_its_window(window: float) -> None:
    count, block = 64_000, 32
    plan = BlockSampler(count, 1, block=block, window=window).plan(None, 0)
    where = np.empty(count, np.int64)
    where[plan.ids] = np.arange(count)
    where = where.reshape(-1, block)
    spread = (where.max(axis=1) - where.min(axis=1)) / count
    expected = window * (block - 1) / (block + 1)
    assert np.median(spread) == pytest.approx(expected, rel=0.1)
    distances = neighbour_distances(plan.ids).reshape(-1)
    within = np.delete(distances, np.arange(block - 1, count - 1, block))
    assert within.mean() == pytest.approx(window * count / 3, rel=0.15)


@pytest.mark.parametrize("window", [0.05, 0.2])
def test_half_a_window_is_read_and_not_yet_due(window: float) -> None:
    """Which is what a cache has to hold of it."""
    count = 64_000
    plan = BlockSampler(count, 1, block=32, window=window).plan(None, 0)
    _, opened, sizes = np.unique(plan.blocks, return_index=True, return_counts=True)
    read = np.bincount(opened, weights=sizes, minlength=count).cumsum()
    held = read - np.arange(1, count + 1)
    assert held.max() < 0.66 * window * count
    assert np.median(held) > 0.4 * window * count


def test_a_batch_has_hardly_two_samples_of_a_block() -> None:
    plan = BlockSampler(50_000, 1, block=32, window=0.2).plan(None, 0)
    batches = plan.blocks[: 50_000 // 256 * 256].reshape(-1, 256)
    distinct = [len(np.unique(batch)) for batch in batches]
    assert np.mean(distinct) > 160  # of about 312 that are open; 175 if they were drawn at random
    assert min(distinct) > 60  # also as an epoch begins


def test_blocks_are_other_ones_in_each_epoch() -> None:
    sampler = BlockSampler(1000, 1, block=10, window=0.1)
    first, second = (neighbour_distances(sampler.plan(None, epoch).ids) for epoch in (0, 1))
    assert (first != second).any()
    assert sampler.plan(None, 0).identity != sampler.plan(None, 1).identity


def test_in_order_there_are_none() -> None:
    plan = BlockSampler(100, shuffle=False).plan(None, 0)
    assert plan.blocks is None
    assert not BlockSampler(100, shuffle=False).reads_blocks
    assert plan.identity == UniformSampler(100, shuffle=False).plan(None, 0).identity


def test_a_window_of_a_whole_epoch_comes_near_to_uniform() -> None:
    """Where neighbours are a third of an epoch apart."""
    plan = BlockSampler(20_000, 3, block=32, window=1.0).plan(None, 0)
    assert neighbour_distances(plan.ids).mean() > 0.65 * 20_000 / 3
    uniform = UniformSampler(20_000, 3).plan(None, 0)
    assert neighbour_distances(uniform.ids).mean() == pytest.approx(20_000 / 3, rel=0.02)


def test_the_window_follows_from_the_cache_unless_it_is_given() -> None:
    room = Room(np.full(1000, 10), 2000)
    assert fit_window(room, 32, None) == pytest.approx(0.2)
    assert fit_window(room, 32, 0.1) == 0.1
    assert fit_window(None, 32, None) == 0.2
    assert fit_window(Room(np.full(40, 10), 400), 32, None) == 1.0  # all of it fits
    with pytest.raises(ConfigError, match=r"give at most 0\.3"):
        fit_window(room, 32, 0.31)
    with pytest.raises(ConfigError, match="room for 64"):
        fit_window(Room(np.full(1000, 10), 600), 32, None)
    with pytest.raises(ConfigError, match="leave block= out"):
        fit_window(Room(np.full(1000, 10), 0), 32, None)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"block": 1}, "block=1"),
        ({"window": 0.0}, "window=0.0"),
        ({"window": 1.5}, "window=1.5"),
        ({"breaks": np.array([5, 3])}, "ascend"),
        ({"breaks": np.array([100])}, "ascend"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, told) -> None:
    with pytest.raises(ConfigError, match=told):
        BlockSampler(100, **wrong)
