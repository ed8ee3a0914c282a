"""The rules of the model, one by one; the native arena is compared with it elsewhere."""

import threading
import time
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from reference.arena import ReferenceArena
from reference.region import turn_of
from stoker.errors import ConfigError, SegmentError
from stoker.policy import S3FIFO, Region


def arena_of(*regions: Region, capacity: int = 10) -> ReferenceArena:
    arena = ReferenceArena(100, capacity)
    if regions:
        arena.configure(regions)
    return arena


def put(
    arena: ReferenceArena, *ids: int, keys: Sequence[float] | None = None, size: int = 1
) -> None:
    """Put samples one after the other, each in a call of its own."""
    for at, i in enumerate(ids):
        arena.put_many([i], [bytes(size)], None if keys is None else [keys[at]])


def cached(arena: ReferenceArena) -> set[int]:
    return set(np.flatnonzero(arena.contains(np.arange(100))).tolist())


def test_batches_come_back_in_order() -> None:
    arena = ReferenceArena(10, 100)
    assert arena.put_many([3, 1], [b"three", bytearray(b"one")]).all()
    data, offsets, found = arena.get_many(np.array([1, 2, 3, 1], dtype=np.uint32))
    assert data.tobytes() == b"onethreeone"
    assert offsets.tolist() == [0, 3, 3, 8, 11]
    assert found.tolist() == [True, False, True, True]


def test_samples_may_come_packed() -> None:
    arena = ReferenceArena(10, 100)
    packed = np.frombuffer(b"abbccc", dtype=np.uint8), np.array([0, 1, 3, 6])
    assert arena.put_many([0, 1, 2], packed).all()
    assert [arena.get(i) for i in range(3)] == [b"a", b"bb", b"ccc"]


def test_an_empty_sample_is_a_sample() -> None:
    arena = ReferenceArena(10, 0)
    assert arena.put(1, b"")
    assert arena.get(1) == b""


def test_equal_keys_leave_in_the_order_of_their_turns_whenever_they_came() -> None:
    assert sorted([7, 2, 5], key=turn_of) == [5, 2, 7]
    for order in permutations([7, 2, 5]):
        arena = arena_of(capacity=3)
        put(arena, *order, keys=[1, 1, 1])
        put(arena, 9, keys=[1])
        assert cached(arena) == {2, 7, 9}


def test_keys_decide_and_can_be_changed() -> None:
    arena = arena_of(capacity=2)
    put(arena, 1, 2, keys=[5, 6])
    arena.set_keys([1, 50], [7.0, 0.0])
    assert arena.keys([1, 2]).tolist() == [7, 6]
    assert np.isnan(arena.keys([50])[0])
    put(arena, 3, keys=[0])
    assert cached(arena) == {1, 3}


def test_putting_again_refreshes_the_key_only() -> None:
    arena = arena_of(capacity=2)
    put(arena, 1, 2, keys=[5, 6])
    assert arena.put(1, b"x", 9.0)
    assert arena.put(2, b"x")
    assert arena.keys([1, 2]).tolist() == [9, 6]
    assert arena.stats()["inserts"] == 2


def test_static_admission_evicts_nothing() -> None:
    arena = arena_of(Region("main", 1.0, order="insertion", admission="while_room"), capacity=2)
    put(arena, 1, 2, 3)
    assert cached(arena) == {1, 2}
    assert arena.stats()["rejected"] == 1


@pytest.mark.parametrize(("ties", "expected"), [(True, {2, 3}), (False, {1, 2})])
def test_ties_are_the_policys_choice(ties: bool, expected: set[int]) -> None:
    arena = arena_of(Region("main", 1.0, admission="beats_victims", ties=ties), capacity=2)
    put(arena, 1, 2, keys=[1, 2])
    put(arena, 3, keys=[1])
    assert cached(arena) == expected


def test_one_victim_that_wins_saves_all() -> None:
    arena = arena_of(Region("main", 1.0, admission="beats_victims"), capacity=4)
    put(arena, 1, 2, keys=[1, 9], size=2)
    arena.put_many([3], [bytes(4)], [5.0])
    assert cached(arena) == {1, 2}
    arena.put_many([3], [bytes(2)], [5.0])
    assert cached(arena) == {2, 3}


def test_leased_samples_are_passed_over_and_keep_their_place() -> None:
    arena = arena_of(Region("main", 1.0, order="insertion"), capacity=3)
    put(arena, 1, 2, 3)
    arena.lease([1, 2], position=5)
    arena.lease([1], position=7)
    put(arena, 4)
    assert cached(arena) == {1, 2, 4}
    arena.release(5)
    put(arena, 5)
    assert cached(arena) == {1, 4, 5}
    arena.release(7)
    put(arena, 6)
    assert cached(arena) == {4, 5, 6}


def test_nothing_waits_for_room_that_cannot_come() -> None:
    arena = arena_of(capacity=2)
    put(arena, 1, 2)
    arena.lease([1, 2], position=0)
    assert not arena.put(3, b"x")
    arena.discard([1])
    assert arena.put(3, b"x")


def test_samples_put_together_do_not_evict_each_other() -> None:
    arena = arena_of(Region("main", 1.0, order="recency"), capacity=2)
    put(arena, 1)
    done = arena.put_many([2, 3, 4, 2], [b"x"] * 4)
    assert done.tolist() == [True, True, False, True]
    assert cached(arena) == {2, 3}


def test_a_strict_region_keeps_to_its_budget() -> None:
    arena = arena_of()
    arena.add_region("side", 3, order="insertion")
    arena.put_many([1], [bytes(7)])
    for i in range(2, 7):
        assert arena.put_many([i], [b"x"], region="side")[0]
    assert cached(arena) == {1, 4, 5, 6}
    assert not arena.put_many([9], [bytes(4)], region="side")[0]
    assert arena.stats()["regions"]["main"]["budget"] == 7


def test_resizing_moves_budget_between_a_region_and_main() -> None:
    arena = arena_of()
    arena.add_region("side", 3, order="insertion")
    put(arena, *range(10, 17))
    arena.resize_region("side", 6)
    assert arena.stats()["regions"]["main"] == {"bytes": 4, "budget": 4, "entries": 4}
    arena.resize_region("side", 0)
    assert arena.stats()["regions"]["main"]["budget"] == 10


def test_the_ghost_sends_returning_ids_to_main() -> None:
    arena = arena_of(*S3FIFO(small=0.2, visits=1).regions())
    for i in range(12):
        arena.put_many([i], [b"x"], region="small")
    regions = arena.stats()["regions"]
    assert (regions["main"]["entries"], regions["ghost"]["entries"]) == (8, 2)
    arena.put_many([0], [b"x"], region="small")
    regions = arena.stats()["regions"]
    assert (regions["main"]["entries"], regions["ghost"]["entries"]) == (9, 2)
    assert arena.contains([0])[0]
    arena.verify()


def test_a_claim_has_one_holder() -> None:
    arena = arena_of()
    put(arena, 1)
    assert arena.claim([1, 2, 2]).tolist() == [False, True, False]
    arena.abandon([2])
    assert arena.claim([2])[0]
    put(arena, 2)
    assert not arena.claim([2])[0]


def test_a_refused_put_gives_the_claim_back() -> None:
    arena = arena_of()
    arena.claim([1])
    assert not arena.put(1, bytes(11))
    assert arena.claim([1])[0]


def test_waiting_ends_with_the_sample_the_claim_or_the_time() -> None:
    arena = arena_of()
    put(arena, 1)
    arena.claim([2, 3])
    timer = threading.Timer(0.05, lambda: (put(arena, 2), arena.abandon([3])))
    timer.start()
    assert arena.wait([1, 2, 3, 4], timeout=30).tolist() == [True, True, False, False]
    timer.join()
    arena.claim([5])
    began = time.monotonic()
    assert not arena.wait([5], timeout=0.05)[0]
    assert time.monotonic() - began < 5


def test_a_closed_arena_says_so() -> None:
    with ReferenceArena(10, 10) as arena:
        put(arena, 1)
    with pytest.raises(SegmentError, match="closed"):
        arena.get(1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda a: a.put_many([100], [b""]), "id 100"),
        (lambda a: a.get_many([-1]), "id -1"),
        (lambda a: a.get_many([0.5]), "float64"),
        (lambda a: a.put_many([1, 2], [b""]), "1 samples for 2 ids"),
        (lambda a: a.put_many([1], [b""], [1.0, 2.0]), "for 1 ids"),
        (lambda a: a.put_many([1], [b""], [np.nan]), "NaN"),
        (lambda a: a.put_many([1], [b""], region="nowhere"), "'nowhere'"),
        (lambda a: a.add_region("main", 1), "'main' exists"),
        (lambda a: a.add_region("side", 11), "11 bytes"),
        (lambda a: a.add_region("side", -1), "bytes=-1"),
        (lambda a: a.resize_region("main", 11), "11 bytes"),
        (lambda a: a.configure([Region("a", 1.0, pop="promote", promote_to="b")]), "'b'"),
    ],
)
def test_refuses_bad_arguments(call: object, named: str) -> None:
    arena = arena_of()
    with pytest.raises(ConfigError, match=named):
        call(arena)  # type: ignore[operator]
    assert arena.stats()["regions"].keys() == {"main"}


@pytest.mark.parametrize(
    ("arguments", "named"), [((0, 1), "num_ids"), ((1, -1), "capacity"), ((1, 1, 0), "mean_size")]
)
def test_refuses_a_bad_size(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReferenceArena(*arguments)
