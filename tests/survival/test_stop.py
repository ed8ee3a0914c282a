"""SIGSTOP and SIGCONT at any instant, in the middle of the lock too: the others go on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from stoker.policy import LRU
from stoker.store.arena import Arena
from survival.board import Field
from survival.payloads import NUM_IDS, sample
from survival.roles import claimant, put_only, reader, writer
from survival.support import (
    LOCK_BOUND,
    MARGIN,
    Fleet,
    check_nothing_is_lost,
    holders_of,
    inode,
    new_arena,
)

_STOPS = 200
_ROLES = [reader, writer, writer, put_only, claimant]
_TRIES = 400
_PROBE = NUM_IDS - 1


@pytest.mark.timeout(0)
def test_two_hundred_stops(tmp_path: Path, soak: float) -> None:
    arena = new_arena(LRU().regions())
    memory = inode(arena)
    end = time.monotonic() + soak
    stops = 0
    with Fleet(arena, _ROLES, tmp_path) as fleet:
        fleet.await_start()
        while stops < _STOPS or time.monotonic() < end:
            time.sleep(random.uniform(0, 0.02))
            places = random.sample(range(len(_ROLES)), random.choice([1, 1, 1, 2]))
            for place in places:
                fleet.stop(place)
            time.sleep(random.choice([0.001, 0.02, 0.08]))
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


def _lock_is_held_up(probe: Arena) -> bool:
    """Return whether a call that needs the lock gives up on it."""
    begin = time.monotonic()
    kept = probe.put(_PROBE, sample(_PROBE))
    return not kept and time.monotonic() - begin > 0.9 * LOCK_BOUND


def _stop_inside_the_lock(fleet: Fleet, place: int, probe: Arena) -> None:
    for _ in range(_TRIES):
        fleet.stop(place)
        if _lock_is_held_up(probe):
            return
        fleet.go_on(place)
        time.sleep(random.uniform(0, 0.01))
    pytest.fail(f"none of {_TRIES} stops came while the process held the lock")


def test_others_go_on_while_the_owner_of_the_lock_is_stopped(tmp_path: Path) -> None:
    arena = new_arena(LRU().regions())
    others = [reader, reader, writer, claimant]
    with Fleet(arena, [put_only, *others], tmp_path) as fleet:
        fleet.await_start()
        _stop_inside_the_lock(fleet, 0, arena)
        before = fleet.board.total(Field.READ)
        fleet.await_rounds(range(1, 5), rounds=20)
        read = fleet.board.total(Field.READ) - before
        begin = time.monotonic()
        assert not arena.put(_PROBE, sample(_PROBE))
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
        _stop_inside_the_lock(fleet, 0, arena)
        fleet.members[0].kill()
        fleet.members[0].join()
        time.sleep(1.0)  # how long nobody waits after a time-out
        assert arena.put(_PROBE, sample(_PROBE))
        assert arena.stats()["repairs"] == 1
    check_nothing_is_lost(arena)
    arena.close()
