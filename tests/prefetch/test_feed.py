"""The window over a rank's coming accesses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.prefetch.feed import SERVED, STARTED, Feed, Segment

SIZES = np.array([10, 20, 30, 40, 50, 60, 70, 80], np.int64)


def segment(*ids: int, epoch: int = 0) -> Segment:
    return Segment(epoch, np.array(ids, np.uint32), None, np.zeros(len(ids), np.uint8))


def test_the_window_bounds_what_is_handed_out() -> None:
    feed = Feed(SIZES, 60)
    accesses = segment(0, 1, 2, 3)
    feed.add(accesses)
    group = feed.take(10)
    assert group is not None and group.ids.tolist() == [0, 1, 2]
    assert feed.take(10) is None
    accesses.served[0] = SERVED
    assert feed.advance() == 1
    assert feed.take(10) is None  # 50 bytes lie ready, 40 more would be too many
    accesses.served[1:3] = SERVED
    assert feed.advance() == 3
    group = feed.take(10)
    assert group is not None and group.ids.tolist() == [3]


def test_a_sample_larger_than_the_window_is_handed_out_alone() -> None:
    feed = Feed(SIZES, 5)
    accesses = segment(7, 6)
    feed.add(accesses)
    group = feed.take(4)
    assert group is not None and group.ids.tolist() == [7]
    assert feed.take(4) is None
    accesses.served[:1] = SERVED
    feed.advance()
    group = feed.take(4)
    assert group is not None and group.ids.tolist() == [6]


def test_what_a_worker_has_started_is_left_to_it() -> None:
    feed = Feed(SIZES, 1000)
    accesses = segment(0, 1, 2, 3)
    feed.add(accesses)
    accesses.served[1:3] = STARTED
    group = feed.take(4)
    assert group is not None and group.ids.tolist() == [0, 3]
    assert feed.advance() == 0  # nothing is over yet


def test_it_goes_on_into_the_next_epoch() -> None:
    feed = Feed(SIZES, 1000)
    first, second = segment(0, 1), segment(2, 3, epoch=1)
    feed.add(first)
    feed.add(second)
    groups = [feed.take(10), feed.take(10)]
    assert [group.ids.tolist() for group in groups if group] == [[0, 1], [2, 3]]
    assert [group.position for group in groups if group] == [1, 3]
    first.served[:] = SERVED
    assert feed.advance() == 2
    assert feed.epochs == [1]
    second.served[:] = SERVED
    assert feed.advance() == 4


def test_positions_go_on_after_a_reset() -> None:
    feed = Feed(SIZES, 1000)
    feed.add(segment(0, 1, 2))
    feed.take(2)
    feed.reset()
    assert feed.take(2) is None
    feed.add(segment(5, epoch=7))
    group = feed.take(2)
    assert group is not None and group.position == 3


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    window=st.integers(1, 300),
    steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=40),
    seed=st.integers(0, 100),
)
def test_every_access_once_in_order_within_the_window(
    lengths: list[int], window: int, steps: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    feed = Feed(SIZES, window)
    segments = [
        segment(*rng.integers(0, len(SIZES), n).tolist(), epoch=e) for e, n in enumerate(lengths)
    ]
    for each in segments:
        feed.add(each)
    everything = np.concatenate([each.ids for each in segments])
    done, low = [], 0
    for most, served in steps:
        group = feed.take(most)
        if group is not None:
            done += group.ids.tolist()
            assert group.position == len(done) - 1
            ready = int(SIZES[everything[low : len(done)]].sum())
            assert ready <= window or len(done) - low == 1
        for _ in range(min(served, len(done) - low)):
            at, place = low, 0
            while at >= lengths[place]:
                at -= lengths[place]
                place += 1
            segments[place].served[at] = SERVED
            low += 1
        # Segments without accesses are over as soon as they are reached.
        assert feed.advance() == low
    assert done == everything[: len(done)].tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_keys_follow_their_samples(most: int) -> None:
    feed = Feed(SIZES, 1000)
    ids = np.array([4, 2, 6], np.uint32)
    feed.add(Segment(0, ids, ids * 1.5, np.zeros(3, np.uint8)))
    group = feed.take(most)
    assert group is not None and group.keys is not None
    np.testing.assert_array_equal(group.keys, group.ids * 1.5)
