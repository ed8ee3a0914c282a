"""SIGSTOP and SIGCONT at any instant, in the middle of the lock too: the others go on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from support.waiting import some_time

from stoker.policy import LRU
from survival.board import Field
from survival.payloads import sample
from survival.roles import claimant, put_only, reader, writer
from survival.support import (
    LOCK_BOUND,
    MARGIN,
    PROBE,
    Fleet,
    check_nothing_is_lost,
    holders_of,
    inode,
    new_arena,
    stop_inside_the_lock,
)

_STOPS = 200
_ROLES = [reader, writer, writer, put_only, claimant]


@pytest.mark.timeout(0)
def test_two_hundred_stops(tmp_path: Path, soak: float) -> None:
    arena = new_arena(LRU().regions())
    memory = inode(arena)
    end = time.monotonic() + soak
    stops = 0
    with Fleet(arena, _ROLES, tmp_path) as fleet:
        fleet.await_start()
        while stops < _STOPS or time.monotonic() < end:
            some_time(0, 0.02)
            places = random.sample(range(len(_ROLES)), random.choice([1, 1, 1, 2]))
            for place in places:
                fleet.stop(place)
            some_time(0.001, 0.08)
            for place in places:
                fleet.go_on(place)
            stops += len(places)
            fleet.check()
            if stops % 20 == 0:
                arena.verify()
        fleet.await_rounds(range(len(_ROLES)))
        fleet.finish()
    stats = arena.stats()
    print(
        f"\n{stops} stops: {stats['bypassed']} bypassed, {stats['reclaimed']} reclaimed, "
        f"{fleet.board.total(Field.READ)} reads, slowest call {fleet.slowest() * 1e3:.1f} ms"
    )
    assert (stats["corrupt"], stats["repairs"], stats["reclaimed"]) == (0, 0, 0)
    assert fleet.slowest() < LOCK_BOUND + MARGIN
    check_nothing_is_lost(arena)
    arena.close()
    assert holders_of(memory) == []


def test_others_go_on_while_the_owner_of_the_lock_is_stopped(tmp_path: Path) -> None:
    arena = new_arena(LRU().regions())
    others = [reader, reader, writer, claimant]
    with Fleet(arena, [put_only, *others], tmp_path) as fleet:
        fleet.await_start()
        stop_inside_the_lock(fleet, 0, arena)
        before = fleet.board.total(Field.READ)
        fleet.await_rounds(range(1, 5), rounds=20)
        read = fleet.board.total(Field.READ) - before
        begin = time.monotonic()
        assert not arena.put(PROBE, sample(PROBE))
        assert time.monotonic() - begin < LOCK_BOUND + MARGIN
        fleet.go_on(0)
        fleet.await_rounds(range(5))
        fleet.finish()
    assert read > 0
    assert fleet.slowest() < LOCK_BOUND + MARGIN
    check_nothing_is_lost(arena)
    arena.close()


def test_the_lock_comes_back_when_its_stopped_owner_is_killed(tmp_path: Path) -> None:
    arena = new_arena(LRU().regions())
    with Fleet(arena, [put_only], tmp_path) as fleet:
        fleet.await_start()
        stop_inside_the_lock(fleet, 0, arena)
        fleet.members[0].kill()
        fleet.members[0].join()
        time.sleep(1.0)  # how long nobody waits after a time-out
        assert arena.put(PROBE, sample(PROBE))
        assert arena.stats()["repairs"] == 1
    check_nothing_is_lost(arena)
    arena.close()
