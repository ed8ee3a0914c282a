"""Fleets of processes around one arena: start, watch, signal, replace, and always end them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest
from support.waiting import await_true, some_time, until

from stoker.policy.base import Region
from stoker.store.arena import Arena, Handle
from survival.board import Board, Field, Row
from survival.payloads import NUM_IDS, SIZES, sample

CAPACITY = int(SIZES.sum()) // 5
LOCK_BOUND = 0.05  # seconds: how long a call may wait for the lock
MARGIN = 0.15  # seconds: what a shared virtual machine may add that the kernel does not report
PATIENCE = 30.0  # seconds without a finished round after which a process counts as stuck
PROBE = NUM_IDS - 1  # the id by which tests see whether the lock can be had
_PR_SET_PDEATHSIG = 1
_TRIES = 400

Role = Callable[[Arena, Row], None]


def new_arena(regions: Iterable[Region] | None = None) -> Arena:
    """Return an arena that holds a fifth of the samples."""
    arena = Arena(NUM_IDS, CAPACITY, 3000)
    if regions is not None:
        arena.configure(list(regions))
    return arena


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(arena: Arena | Handle, board: Board, place: int, role: Role, reports: Path) -> None:
    die_with_parent()
    try:
        if isinstance(arena, Handle):
            arena = Arena.attach(arena)
        role(arena, board.row(place))
    except BaseException:
        (reports / f"{role.__name__}-{os.getpid()}").write_text(traceback.format_exc())
        os._exit(1)


class Fleet:
    """Processes that play ``roles`` on an arena: forked, or started apart with its handle.

    Use it in a ``with`` statement: whatever happens, no process stays behind.
    """

    def __init__(self, arena: Arena, roles: Iterable[Role], reports: Path, start: str = "fork"):
        self.roles = list(roles)
        self.board = Board(len(self.roles))
        self.members: list[BaseProcess] = []
        self._arena, self._reports = arena, reports
        self._context = multiprocessing.get_context(start)
        self._first: dict[int, int] = {}
        self._beats = [(0, time.monotonic())] * len(self.roles)

    def __enter__(self) -> Fleet:
        self.members = [self._start(place) for place in range(len(self.roles))]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            member.join()
            member.close()

    def _start(self, place: int) -> BaseProcess:
        joined = self._arena if self._context.get_start_method() == "fork" else self._arena.handle
        self._first[place] = self.board.get(place, Field.BEATS)
        self._beats[place] = (self._first[place], time.monotonic())
        arguments = (joined, self.board, place, self.roles[place], self._reports)
        process = self._context.Process(target=_main, args=arguments)
        with warnings.catch_warnings():
            # NumPy's threads are idle, and fork in a process with threads is what is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        return process

    def await_start(self) -> None:
        """Return when each member has finished a round since it began."""
        self._await(range(len(self.roles)), self._first)

    def await_rounds(self, places: Iterable[int], rounds: int = 1) -> None:
        """Return when the members of ``places`` have finished so many rounds from now."""
        now = {place: self.board.get(place, Field.BEATS) for place in places}
        self._await(now, {place: beats + rounds - 1 for place, beats in now.items()})

    def _await(self, places: Iterable[int], beats: Mapping[int, int]) -> None:
        def have_all() -> bool:
            self.check()
            return all(self.board.get(place, Field.BEATS) > beats[place] for place in places)

        until(have_all, 10 * PATIENCE)

    def check(self) -> None:
        """Raise AssertionError if a member failed, or has finished no round for too long."""
        for report in self._reports.iterdir():
            raise AssertionError(f"{report.name}: {report.read_text()}")
        now = time.monotonic()
        for place, (beats, since) in enumerate(self._beats):
            current = self.board.get(place, Field.BEATS)
            if current != beats:
                self._beats[place] = (current, now)
            elif now - since > PATIENCE:
                raise AssertionError(f"{self.roles[place].__name__} {place} is stuck")

    def watch(self, seconds: float) -> None:
        """Let the fleet run."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.2))

    def pick(self) -> int:
        """Return the place of a random member that is at work: it has finished a round."""
        working: list[int] = []

        def is_any_at_work() -> bool:
            self.check()
            beats = [self.board.get(place, Field.BEATS) for place in self._first]
            working[:] = [place for place in self._first if beats[place] > self._first[place]]
            return bool(working)

        until(is_any_at_work, PATIENCE)
        return random.choice(working)

    def kill(self, place: int) -> None:
        """Kill one member and put another in its place."""
        victim = self.members[place]
        victim.kill()
        victim.join()
        victim.close()
        self.members[place] = self._start(place)

    def stop(self, place: int) -> None:
        """Stop one member."""
        self.board.add(place, Field.STOPS, 1)
        os.kill(self._pid(place), signal.SIGSTOP)

    def go_on(self, place: int) -> None:
        """Continue one member."""
        # Again, for a call that began after the first note and before the signal arrived.
        self.board.add(place, Field.STOPS, 1)
        os.kill(self._pid(place), signal.SIGCONT)

    def finish(self) -> None:
        """Have all members end by themselves, and check that they did."""
        self.board.ring_off()
        for member in self.members:
            member.join(PATIENCE)
        self.check()
        assert [member.exitcode for member in self.members] == [0] * len(self.members)
        assert self.board.total(Field.WRONG) == 0

    def slowest(self) -> float:
        """Return the longest call so far in seconds, without the time it waited for a CPU."""
        return self.board.most(Field.SLOWEST) / 1e9

    def _pid(self, place: int) -> int:
        pid = self.members[place].pid
        assert pid is not None
        return pid


def _lock_is_held_up(probe: Arena) -> bool:
    """Return whether calls that need the lock give up on it, again and again."""
    begin = time.monotonic()
    if probe.put(PROBE, sample(PROBE)) or time.monotonic() - begin < 0.9 * LOCK_BOUND:
        return False
    # It might have been another process that waits for a CPU.
    return not await_true(lambda: probe.put(PROBE, sample(PROBE)), 0.7)


def stop_inside_the_lock(fleet: Fleet, place: int, probe: Arena) -> None:
    """Stop a member that puts all the time at an instant at which it holds the lock."""
    for _ in range(_TRIES):
        fleet.stop(place)
        if _lock_is_held_up(probe):
            return
        fleet.go_on(place)
        some_time(0, 0.01)
    pytest.fail(f"none of {_TRIES} stops came while the process held the lock")


def check_nothing_is_lost(arena: Arena) -> None:
    """Check that all of an arena can be used, when this is the last process that has it."""
    arena.reclaim()
    arena.verify()
    ids = np.arange(NUM_IDS, dtype=np.uint32)
    cached = arena.contains(ids)
    claimed = arena.claim(ids)
    np.testing.assert_array_equal(claimed, ~cached)
    arena.abandon(ids)
    arena.discard(ids)
    arena.verify()
    stats = arena.stats()
    assert stats["payload_bytes"] == 0
    fresh = new_arena()
    assert stats["free_blocks"] == fresh.stats()["free_blocks"]
    fresh.close()


def inode(arena: Arena) -> str:
    """Return what names the arena's memory in /proc."""
    return str(os.fstat(arena.handle.fds[0]).st_ino)


def holders_of(*numbers: str) -> list[str]:
    """Return the descriptors and mappings of any process that still refer to memory files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            found += [f"{process}/maps: {line}" for line in lines if _is_memory(line, numbers)]
            for fd in (process / "fd").iterdir():
                if "memfd:stoker" in str(fd.readlink()) and str(fd.stat().st_ino) in numbers:
                    found.append(str(fd))
        except OSError:
            continue  # it has ended meanwhile
    return found


def _is_memory(line: str, numbers: tuple[str, ...]) -> bool:
    fields = line.split()
    return len(fields) > 5 and fields[4] in numbers and "memfd:stoker" in fields[5]
