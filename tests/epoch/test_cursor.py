"""How far the training loop is."""

from __future__ import annotations

from stoker.epoch.cursor import Cursor, Walk


def test_a_step_takes_a_stride_of_the_plan_whatever_this_rank_got() -> None:
    walk = Walk(Cursor(3), stride=16, end=42, world_size=4)
    assert walk.cursor == Cursor(3)
    walk.step(4)
    assert walk.cursor == Cursor(3, 16, 1)
    walk.step(4)
    walk.step(2)
    assert walk.cursor == Cursor(3, 42, 3)


def test_it_goes_on_from_where_it_begins() -> None:
    walk = Walk(Cursor(1, 40, 5), stride=8, end=100, world_size=2)
    walk.step(4)
    assert (walk.start, walk.cursor) == (Cursor(1, 40, 5), Cursor(1, 48, 6))


def test_without_a_plan_each_rank_is_taken_to_have_as_much() -> None:
    walk = Walk(Cursor(), stride=None, end=None, world_size=3)
    walk.step(5)
    walk.step(2)
    assert walk.cursor == Cursor(0, 21, 2)
