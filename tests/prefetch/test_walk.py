"""The window over a rank's coming accesses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.prefetch.walk import SERVED, STARTED, Blocks, Marks, Segment, Walk

SIZES = np.array([10, 20, 30, 40, 50, 60, 70, 80], np.int64)


def segment(*ids: int, epoch: int = 0) -> Segment:
    return Segment(epoch, np.array(ids, np.uint32), None, marks_of(len(ids)), 1)


def marks_of(length: int) -> Marks:
    marks = Marks(np.zeros(Marks.bytes(length), np.uint8))
    marks.begin(0.0)
    return marks


def take_all(walk: Walk, most: int = 10) -> list[list[int]]:
    """Take groups until the window is full; return their ids."""
    groups = []
    while (group := walk.take(most)) is not None:
        groups.append(group.ids.tolist())
    return groups


def test_the_window_bounds_what_is_handed_out() -> None:
    walk = Walk(SIZES, 60)
    accesses = segment(0, 1, 2, 3)
    walk.add(accesses)
    assert sum(take_all(walk), []) == [0, 1, 2]  # noqa: RUF017
    accesses.marks.served[0] = SERVED
    assert walk.advance() == 1
    assert take_all(walk) == []  # 50 bytes lie ready, 40 more would be too many
    accesses.marks.served[1:3] = SERVED
    assert walk.advance() == 3
    assert take_all(walk) == [[3]]


def test_a_group_holds_its_room_until_all_of_it_is_served() -> None:
    walk = Walk(np.full(20, 10), 160)
    accesses = segment(*range(20))
    walk.add(accesses)
    assert take_all(walk) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    accesses.marks.served[:3] = SERVED
    assert walk.advance() == 0
    assert take_all(walk) == []
    accesses.marks.served[3] = SERVED
    assert walk.advance() == 4
    assert take_all(walk) == [[16, 17, 18, 19]]


def test_what_is_cached_takes_up_no_room() -> None:
    walk = Walk(np.full(20, 10), 40, reach_bytes=100)
    accesses = segment(*range(20))
    walk.add(accesses)
    near = []
    for _ in range(8):  # the first eight are hits
        group = walk.take(1)
        assert group is not None
        near.append(group.is_near)
        walk.keep_room_for(group.ids[:0])
    assert near == [True] * 4 + [False] * 4
    assert walk.held == 0
    assert take_all(walk) == [[8], [9], [10]]  # no farther than the reach
    assert walk.held == 30
    accesses.marks.served[:2] = SERVED
    assert walk.advance() == 2
    assert take_all(walk) == [[11]]  # now the window is full
    accesses.marks.served[2:9] = SERVED
    assert walk.advance() == 9
    assert take_all(walk) == [[12]]


def test_a_sample_larger_than_the_window_is_left_to_the_workers() -> None:
    walk = Walk(SIZES, 50)
    accesses = segment(0, 7, 1)
    walk.add(accesses)
    assert take_all(walk) == [[0]]
    accesses.marks.served[:2] = SERVED
    assert walk.advance() == 2
    assert take_all(walk) == [[1]]


def test_it_says_when_the_window_is_full() -> None:
    walk = Walk(SIZES, 60)
    accesses = segment(0, 1, 2, 3)
    walk.add(accesses)
    take_all(walk)
    walk.confirm()
    assert (accesses.marks.handed_out, accesses.marks.is_full) == (3, True)
    accesses.marks.served[:3] = SERVED
    walk.advance()
    take_all(walk)
    walk.confirm()
    assert (accesses.marks.handed_out, accesses.marks.is_full) == (4, False)


def test_no_window_hands_out_nothing() -> None:
    walk = Walk(SIZES, 0)
    walk.add(segment(0, 1))
    assert take_all(walk) == []


def test_marks_that_serve_a_later_epoch_end_the_one_before() -> None:
    walk = Walk(SIZES, 1000)
    first, second = segment(0, 1, 2, 3), segment(4, 5, epoch=1)
    walk.add(first)
    walk.add(second)
    assert take_all(walk, 2) == [[0, 1], [2, 3], [4, 5]]
    first.marks.begin(0.0)  # for the third epoch: nobody looked after the last access
    assert walk.advance() == 4


def test_nothing_is_handed_out_for_an_epoch_whose_marks_serve_a_later_one() -> None:
    walk = Walk(SIZES, 1000)
    first = segment(0, 1, 2, 3)
    walk.add(first)
    first.marks.begin(0.0)
    assert take_all(walk, 2) == []
    walk.confirm()
    assert first.marks.handed_out == 0


def test_it_says_how_far_it_is() -> None:
    walk = Walk(SIZES, 1000)
    first, second = segment(0, 1, 2), segment(3, 4, epoch=1)
    walk.add(first)
    walk.add(second)
    assert not first.marks.is_attended
    walk.take(2)
    walk.confirm()
    assert first.marks.is_attended and second.marks.is_attended
    assert (first.marks.handed_out, second.marks.handed_out) == (2, 0)
    take_all(walk)
    walk.confirm()
    assert (first.marks.handed_out, second.marks.handed_out) == (3, 2)


def test_what_a_worker_has_started_is_left_to_it() -> None:
    walk = Walk(SIZES, 1000)
    accesses = segment(0, 1, 2, 3)
    walk.add(accesses)
    accesses.marks.served[1:3] = STARTED
    group = walk.take(4)
    assert group is not None and group.ids.tolist() == [0, 3]
    assert walk.advance() == 0  # nothing is over yet


def test_it_goes_on_into_the_next_epoch() -> None:
    walk = Walk(SIZES, 1000)
    first, second = segment(0, 1), segment(2, 3, epoch=1)
    walk.add(first)
    walk.add(second)
    groups = [walk.take(10), walk.take(10)]
    assert [group.ids.tolist() for group in groups if group] == [[0, 1], [2, 3]]
    assert [group.position for group in groups if group] == [1, 3]
    first.marks.served[:] = SERVED
    assert walk.advance() == 2
    second.marks.served[:] = SERVED
    assert walk.advance() == 4


def test_positions_go_on_after_a_reset() -> None:
    walk = Walk(SIZES, 1000)
    walk.add(segment(0, 1, 2))
    walk.take(2)
    walk.reset()
    assert walk.take(2) is None
    walk.add(segment(5, epoch=7))
    group = walk.take(2)
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
    walk = Walk(SIZES, window)
    segments = [
        segment(*rng.integers(0, len(SIZES), n).tolist(), epoch=e) for e, n in enumerate(lengths)
    ]
    for each in segments:
        walk.add(each)
    everything = np.concatenate([each.ids for each in segments])
    done, begins, low = [], [], 0
    for most, served in steps:
        group = walk.take(most)
        if group is not None:
            done += group.ids.tolist()
            assert group.position == len(done) - 1
            begins.append(len(done) - len(group.ids))
            held = max((begin for begin in begins if begin <= low), default=0)
            ready = int(SIZES[everything[held : len(done)]].sum())
            assert ready <= window
        for _ in range(min(served, len(done) - low)):
            at, place = low, 0
            while at >= lengths[place]:
                at -= lengths[place]
                place += 1
            segments[place].marks.served[at] = SERVED
            low += 1
        # Up to the group that is not all served; segments without accesses are over at once.
        assert walk.advance() == max(begin for begin in [*begins, len(done)] if begin <= low)
    assert done == everything[: len(done)].tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_keys_follow_their_samples(most: int) -> None:
    walk = Walk(SIZES, 1000)
    ids = np.array([4, 2, 6], np.uint32)
    walk.add(Segment(0, ids, ids * 1.5, marks_of(3), 1))
    group = walk.take(most)
    assert group is not None and group.keys is not None
    np.testing.assert_array_equal(group.keys, group.ids * 1.5)


def test_a_group_and_the_rest_of_its_blocks() -> None:
    numbers = np.array([7, 2, 7, 2, 7, 9], np.uint32)
    ids = np.array([10, 11, 12, 13, 14, 15], np.uint32)
    blocks = Blocks(numbers, -np.arange(6.0))
    assert sorted(blocks.of(np.array([0, 2])).tolist()) == [0, 2, 4]
    assert blocks.of(np.empty(0, np.int64)).tolist() == []
    walk = Walk(np.full(20, 10), 60)
    walk.add(Segment(0, ids, ids * 1.5, marks_of(6), 1, blocks))
    group = walk.take(2)
    assert group is not None and group.ids.tolist() == [10]  # a quarter of the window at once
    walk.resize(80)
    group = walk.take(2)
    assert group is not None and group.ids.tolist() == [11, 12]
    group.segment.marks.served[4] = STARTED
    whole = group.with_neighbours(lambda ids: np.zeros(len(ids), np.bool_))
    assert whole.ids.tolist() == [11, 12, 13, 10]
    assert whole.is_early is not None and whole.is_early.tolist() == [False, False, True, True]
    assert whole.keys is not None and whole.keys.tolist() == [16.5, 18.0, -3.0, 0.0]
    part = whole.part(np.array([False, True, False, True]))
    assert part.ids.tolist() == [12, 10] and part.is_early is not None
    assert part.is_early.tolist() == [False, True]
    assert part.position == group.position


def test_blocks_are_read_less_far_ahead() -> None:
    """They take up the cache until their samples are due."""
    cached = [walk_of(800, None), walk_of(800, Blocks(np.zeros(80, np.uint32), None))]
    reached = []
    for walk in cached:
        count = 0
        while (group := walk.take(1)) is not None:
            walk.keep_room_for(group.ids[:0])
            count += len(group.ids)
        reached.append(count)
    assert reached == [80, 11]


def walk_of(reach: int, blocks: Blocks | None) -> Walk:
    walk = Walk(np.full(80, 10), 40, reach_bytes=reach)
    walk.add(Segment(0, np.arange(80, dtype=np.uint32), None, marks_of(80), 1, blocks))
    return walk
