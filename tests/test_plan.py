import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.shared import SharedArray


def plan_of(*ids: int, epoch: int = 0, start: int = 0) -> Plan:
    return Plan(epoch, start, np.array(ids, dtype=np.uint32))


def next_use_by_scanning(ids: list[int]) -> list[int]:
    return [
        next((later for later in range(at + 1, len(ids)) if ids[later] == sample), len(ids))
        for at, sample in enumerate(ids)
    ]


def test_next_use_points_at_the_next_access() -> None:
    np.testing.assert_array_equal(plan_of(3, 1, 3, 3, 2).next_use, [2, 5, 3, 5, 5])


@pytest.mark.parametrize("length", [0, 1, 2, 50, 500])
@pytest.mark.parametrize("distinct", [1, 7, 400])
def test_next_use_agrees_with_a_scan(length: int, distinct: int) -> None:
    ids = np.random.default_rng(length).integers(0, distinct, length).tolist()
    plan = plan_of(*ids)
    assert plan.next_use.dtype == np.int64
    assert plan.next_use.tolist() == next_use_by_scanning(ids)


def test_next_use_of_the_largest_ids() -> None:
    last = 2**32 - 1
    np.testing.assert_array_equal(plan_of(last, 0, last).next_use, [2, 3, 3])


def test_next_use_of_five_million_accesses_is_vectorised() -> None:
    ids = np.random.default_rng(0).integers(0, 1_000_000, 5_000_000, dtype=np.uint32)
    plan = Plan(0, 0, ids)
    began = time.process_time()
    next_use = plan.next_use
    assert time.process_time() - began < 5  # 0.6 s here; a Python loop takes far longer
    assert np.shares_memory(plan.next_use, next_use)
    sampled = np.flatnonzero(next_use < len(ids))[::100_000]
    np.testing.assert_array_equal(ids[sampled], ids[next_use[sampled]])


def test_a_sample_that_never_comes_again_comes_after_all_others() -> None:
    never = np.full(2, np.finfo(np.float32).max / 2)  # a Subset's, and of a weight of 0
    plan = Plan(0, 0, np.array([0], np.uint32), beyond=never)
    assert plan.first_use(2)[1] > 2**59
    assert plan.next_use[0] > 2**59


def test_beyond_the_end_the_expected_use_counts() -> None:
    beyond = np.array([5, 0, 2.5], np.float32)
    plan = Plan(0, 0, np.array([0, 1, 0, 1], np.uint32), beyond=beyond)
    np.testing.assert_array_equal(plan.next_use, [2, 3, 4 + 5, 4 + 0])
    np.testing.assert_array_equal(plan.first_use(3), [0, 1, 4 + 2])
    np.testing.assert_array_equal(plan.first_use(5), [0, 1, 6, 4, 4])


def test_what_is_expected_counts_from_the_end_of_the_plan_that_follows() -> None:
    later = Plan(1, 3, np.array([2, 2], np.uint32), beyond=np.array([7, 1, 9, 3], np.float32))
    plan = plan_of(0, 1, 0).followed_by(later)
    np.testing.assert_array_equal(plan.next_use, [2, 5 + 1, 5 + 7])
    np.testing.assert_array_equal(plan.first_use(4), [0, 1, 3, 5 + 3])
    assert np.shares_memory(plan.ids, plan.followed_by(None).ids)
    assert plan.followed_by(None).following is None


def test_nobody_can_write() -> None:
    given = np.array([1, 2, 3], dtype=np.uint32)
    plan = Plan(0, 0, given, np.ones(3, dtype=np.float32))
    given[0] = 9
    assert plan.ids[0] == 1
    assert plan.weights is not None
    for array in (plan.ids, plan.weights, plan.next_use, plan.rank_view(0, 2)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epoch = 1  # type: ignore[misc]


def test_rank_views_are_strided_and_not_copied() -> None:
    plan = plan_of(10, 11, 12, 13, 14)
    np.testing.assert_array_equal(plan.rank_view(0, 2), [10, 12, 14])
    np.testing.assert_array_equal(plan.rank_view(1, 2), [11, 13])
    assert np.shares_memory(plan.rank_view(1, 2), plan.ids)


def test_unequal_ranks_are_refused_when_equality_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="pad_to=2"):
        plan_of(1, 2, 3).rank_view(0, 2, equal=True)
    assert len(plan_of(1, 2, 3, 4).rank_view(0, 2, equal=True)) == 2


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_refuses_a_rank_out_of_range(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"world_size={world_size}"):
        plan_of(1, 2).rank_view(rank, world_size)


def test_identity_tells_plans_apart() -> None:
    same = {plan_of(1, 2).identity, Plan(0, 7, np.array([1, 2])).identity}
    assert len(same) == 1
    assert (
        len({plan_of(1, 2).identity, plan_of(2, 1).identity, plan_of(1, 2, epoch=1).identity}) == 3
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"epoch": -1}, "epoch=-1"),
        ({"start": -5}, "start=-5"),
        ({"beyond": np.array([1.0, np.nan])}, "expectation nan"),
        ({"beyond": np.array([-1.0])}, "expectation -1"),
        ({"ids": np.zeros((2, 2), dtype=np.uint32)}, "shape"),
        ({"ids": np.array([0.5, 1.0])}, "float64"),
        ({"ids": np.array([-1, 2])}, "from -1 to 2"),
        ({"ids": np.array([1, 2**32])}, "4294967296"),
        ({"weights": np.ones(3, dtype=np.float32)}, "3 weights for 2 ids"),
        ({"weights": np.array([1, np.nan], dtype=np.float32)}, "position 1"),
        ({"weights": np.array([-1, 1], dtype=np.float32)}, "position 0"),
    ],
)
def test_refuses_bad_arguments(arguments: dict[str, object], named: str) -> None:
    good = {"epoch": 0, "start": 0, "ids": np.array([1, 2], dtype=np.uint32)}
    with pytest.raises(ConfigError, match=named):
        Plan(**(good | arguments))  # type: ignore[arg-type]


def test_takes_over_a_shared_array() -> None:
    memory = SharedArray.copy_of(np.array([4, 5], dtype=np.uint32))
    assert np.shares_memory(Plan(0, 0, memory).ids, memory.array)  # type: ignore[arg-type]


def report(plan: Plan, pipe: Connection) -> None:
    written = plan.ids.flags.writeable
    pipe.send((plan.epoch, plan.start, plan.ids.tolist(), plan.next_use.tolist(), written))
    pipe.send((os.fstat(plan._memory["ids"].fileno()).st_ino, plan.identity, len(plan)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_share_the_memory(method: str) -> None:
    plan = plan_of(1, 2, 1, epoch=4, start=12)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=report, args=(plan, theirs))
    child.start()
    theirs.close()
    assert ours.recv() == (4, 12, [1, 2, 1], [2, 3, 3], False)
    inode = os.fstat(plan._memory["ids"].fileno()).st_ino
    assert ours.recv() == (inode, plan.identity, 3)
    child.join(30)
    assert child.exitcode == 0
    ours.close()


def test_a_plan_starts_elsewhere_with_the_same_memory() -> None:
    plan = Plan(1, 0, np.array([2, 0, 1]), np.ones(3, np.float32), beyond=np.zeros(3))
    moved = plan.starting_at(7)
    assert (moved.start, moved.epoch) == (7, 1)
    for name in ("ids", "weights", "beyond"):
        assert np.shares_memory(getattr(moved, name), getattr(plan, name))


def test_without_weights_the_ids_stay_where_they_are() -> None:
    after = Plan(2, 10, np.array([1, 1, 1]))
    plan = Plan(1, 7, np.array([2, 0, 1]), np.ones(3, np.float32), after, np.zeros(3))
    bare = plan.unweighted()
    assert (bare.start, bare.epoch, bare.following) == (7, 1, after)
    assert bare.weights is None and bare.beyond is None
    assert np.shares_memory(bare.ids, plan.ids)
    bare = plan.unweighted(foreseeing=True)
    assert bare.weights is None and bare.beyond is not None
    assert np.shares_memory(bare.beyond, plan.beyond)


@pytest.mark.parametrize("ids", [[2, 0, 1], [2, 0, 2, 1, 0, 2], []])
def test_which_samples_come_again(ids: list[int]) -> None:
    plan = plan_of(*ids)
    again = plan.comes_again
    assert (again is None) == plan.is_once_each == (len(set(ids)) == len(ids))
    if again is not None:
        assert again.tolist() == [sample in ids[at + 1 :] for at, sample in enumerate(ids)]
    asked = np.array([0, 7, 1], np.uint32)
    assert plan.has(asked).tolist() == [sample in ids for sample in asked]


def test_what_is_made_of_a_plan_repeats_as_it_does() -> None:
    for repeats in (False, True):
        plan = Plan(0, 0, np.array([0, 1, 0]), np.ones(3), repeats=repeats)
        sent = Plan(0, 0, np.array([0]))
        sent.__setstate__(plan.__getstate__())
        made = plan.followed_by(plan), plan.starting_at(4), plan.unweighted(), sent
        assert {one.repeats for one in made} == {repeats}


def test_blocks_stay_with_what_is_made_of_a_plan() -> None:
    plan = Plan(1, 0, np.array([3, 1, 2]), np.array([1, 2, 1]), blocks=np.array([1, 0, 1]))
    for made in (plan, plan.followed_by(plan), plan.starting_at(5), plan.unweighted()):
        assert made.blocks is not None and made.blocks.tolist() == [1, 0, 1]
        assert not made.blocks.flags.writeable
    assert plan.block_use.tolist() == [3, 1, 0, 0]
    assert plan_of(3, 1, 3).block_use.tolist() == [3, 1, 3, 0]
    assert plan_of().block_use.tolist() == [0]
    with pytest.raises(ConfigError, match="2 blocks for 3 ids"):
        Plan(0, 0, np.arange(3), blocks=np.arange(2))
