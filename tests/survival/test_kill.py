"""SIGKILL at any instant: nobody hangs, no wrong bytes, all space comes back."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from support.waiting import await_true, some_time

from stoker.policy import LRU, S3FIFO, Policy
from stoker.store.arena import Arena
from survival.board import Field, Row
from survival.roles import claimant, put_only, reader, writer
from survival.support import (
    LOCK_BOUND,
    MARGIN,
    PATIENCE,
    Fleet,
    check_nothing_is_lost,
    holders_of,
    inode,
    new_arena,
)

_KILLS = 100  # with each policy
_FOREVER = 1e6  # seconds
_FUTEX, _FUTEX_OF_ARM, _FUTEX_WAIT = "202", "98", 0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", [LRU(), S3FIFO()], ids=lambda policy: policy.name)
def test_two_hundred_kills(tmp_path: Path, soak: float, policy: Policy) -> None:
    arena = new_arena(policy.regions())
    memory = inode(arena)
    end = time.monotonic() + soak / 2
    kills = 0
    with Fleet(arena, [reader, reader, writer, put_only, claimant, claimant], tmp_path) as fleet:
        fleet.await_start()
        while kills < _KILLS or time.monotonic() < end:
            some_time(0, 0.01)
            fleet.kill(fleet.pick())
            kills += 1
            fleet.check()
            if kills % 20 == 0:
                arena.verify()
        fleet.await_rounds(range(6))
        fleet.finish()
    stats = arena.stats()
    print(
        f"\n{kills} kills: {stats['repairs']} of the lock's owner, {stats['reclaimed']} claims and "
        f"reservations reclaimed, {stats['bypassed']} bypassed, "
        f"{fleet.board.total(Field.READ)} reads, slowest call {fleet.slowest() * 1e3:.1f} ms"
    )
    assert stats["corrupt"] == 0
    assert stats["reclaimed"] > 0
    assert fleet.slowest() < LOCK_BOUND + MARGIN
    check_nothing_is_lost(arena)
    arena.close()
    assert holders_of(memory) == []


def _claim_and_sleep(arena: Arena, row: Row) -> None:
    assert arena.claim([3, 4]).all()
    row.add(Field.BEATS)
    while True:
        signal.pause()


def _waits_in_the_arena(thread: Thread) -> bool:
    """Whether a thread is in a futex that processes share; those of Python itself are private."""
    syscall = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
    return syscall[0] in (_FUTEX, _FUTEX_OF_ARM) and int(syscall[2], 16) == _FUTEX_WAIT


def test_a_waiter_hears_of_a_killed_claimant(tmp_path: Path) -> None:
    arena = new_arena()
    answers: list[bool] = []
    waiter = Thread(target=lambda: answers.extend(arena.wait([3, 4], _FOREVER)), daemon=True)
    with Fleet(arena, [_claim_and_sleep], tmp_path) as fleet:
        fleet.await_start()
        waiter.start()
        assert await_true(lambda: _waits_in_the_arena(waiter))
        assert waiter.is_alive() and not answers
        fleet.members[0].kill()
        waiter.join(PATIENCE)
        assert answers == [False, False]
    assert arena.stats()["reclaimed"] == 2
    assert arena.claim([3, 4]).all()
    arena.close()


def test_the_claims_of_the_dead_can_be_claimed_at_once(tmp_path: Path) -> None:
    arena = new_arena()
    with Fleet(arena, [_claim_and_sleep], tmp_path) as fleet:
        fleet.await_start()
        assert arena.claim([3, 4, 5]).tolist() == [False, False, True]
        assert not arena.put(3, b"not the caller's to put")
    assert arena.claim([3, 4]).all()
    assert arena.put_many([3, 4], [b"3", b"4"]).all()
    arena.verify()
    arena.close()


def _put_and_sleep(arena: Arena, row: Row) -> None:
    assert arena.put(9, b"9")
    row.add(Field.BEATS)
    while True:
        signal.pause()


def test_claims_of_the_dead_are_not_those_of_their_successor(tmp_path: Path) -> None:
    arena = new_arena()
    with Fleet(arena, [_claim_and_sleep], tmp_path) as fleet:
        fleet.await_start()
    with Fleet(arena, [_put_and_sleep], tmp_path) as fleet:  # alive, in the dead one's slot
        fleet.await_start()
        assert arena.claim([3, 4]).all()
    arena.close()


_LARGE = 64 << 20


def _copy_in(arena: Arena, row: Row) -> None:
    data = np.full(_LARGE, 7, np.uint8)
    while True:
        assert arena.put(0, data)
        row.add(Field.BEATS)
        arena.discard([0])


def test_what_was_being_copied_in_is_reclaimed(tmp_path: Path) -> None:
    arena = Arena(10, _LARGE, _LARGE)
    memory = inode(arena)
    free = arena.stats()["free_blocks"]
    with Fleet(arena, [_copy_in], tmp_path) as fleet:
        for _ in range(10):
            fleet.await_start()
            while not (arena.stats()["payload_bytes"] and not arena.contains([0]).any()):
                fleet.check()
            fleet.members[0].kill()
            fleet.members[0].join()
            reserved = not arena.contains([0]).any()
            arena.reclaim()
            arena.verify()
            if reserved:
                assert arena.stats()["payload_bytes"] == 0
                assert arena.stats()["free_blocks"] == free
                assert not arena.wait([0], 1).any()
            fleet.kill(0)
    assert arena.stats()["reclaimed"] > 0
    arena.close()
    assert holders_of(memory) == []


def _lease_and_sleep(arena: Arena, row: Row) -> None:
    assert arena.lease(np.arange(100), 0)
    row.add(Field.BEATS)
    while True:
        signal.pause()


def test_leases_end_with_their_process(tmp_path: Path) -> None:
    arena = Arena(200, 10_000, 100)
    sample = bytes(100)
    assert arena.put_many(np.arange(100), [sample] * 100).all()
    with Fleet(arena, [_lease_and_sleep], tmp_path) as fleet:
        fleet.await_start()
        assert not arena.put_many(np.arange(100, 200), [sample] * 100).any()
    arena.reclaim()
    assert arena.put_many(np.arange(100, 200), [sample] * 100).all()
    arena.verify()
    arena.close()


def test_no_memory_is_left_when_the_last_holder_is_killed(tmp_path: Path) -> None:
    arena = new_arena()
    memory = inode(arena)
    with Fleet(arena, [_claim_and_sleep], tmp_path) as fleet:
        fleet.await_start()
        arena.close()
        assert holders_of(memory)
    assert holders_of(memory) == []
