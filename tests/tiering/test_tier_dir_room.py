"""Reservations against a reference model, and how a failing tier rests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.tiering.tier_dir import FIRST_REST, Rooms


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=60),
)
def test_first_tier_with_room(quotas: list[int], steps: list[tuple[int, bool]]) -> None:
    rooms = Rooms(quotas, [0] * len(quotas))
    held: list[tuple[int, int]] = []
    for size, is_free in steps:
        if is_free and held:
            tier, freed = held.pop(size % len(held))
            rooms.free(tier, freed)
            continue
        used = [sum(s for t, s in held if t == i) for i in range(len(quotas))]
        fits = [i for i, quota in enumerate(quotas) if used[i] + size <= quota]
        got = rooms.reserve(size)
        assert got == (fits[0] if fits else None)
        if got is not None:
            held.append((got, size))
    assert rooms.used() == [sum(s for t, s in held if t == i) for i in range(len(quotas))]


def test_a_failing_tier_rests_and_the_next_takes_over() -> None:
    now = [0.0]
    rooms = Rooms([10, 10], [0, 0], lambda: now[0])
    assert rooms.reserve(5) == 0
    rooms.failed(0)
    rooms.failed(0)  # a copy that was under way meanwhile
    assert rooms.rests(0) and rooms.any_rests() and not rooms.rests(1)
    assert rooms.reserve(5) == 1 and rooms.reserve(6) is None
    now[0] += FIRST_REST
    assert not rooms.any_rests() and rooms.reserve(5) == 0
    rooms.failed(0)
    now[0] += 2 * FIRST_REST - 0.1
    assert rooms.rests(0), "longer each time"
    now[0] += 0.1
    assert not rooms.rests(0)
    rooms.worked(0)
    rooms.failed(0)
    now[0] += FIRST_REST
    assert not rooms.rests(0), "a success makes the next rest short again"


def test_a_closed_tier_is_never_used_again() -> None:
    now = [0.0]
    rooms = Rooms([10], [10], lambda: now[0])
    rooms.close(0)
    rooms.free(0, 10)
    now[0] += 1e9
    assert rooms.reserve(1) is None and rooms.is_closed(0) and not rooms.any_rests()
