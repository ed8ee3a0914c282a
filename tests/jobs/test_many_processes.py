"""Many processes at one cache and its table of jobs: all are known, and the dead are not missed."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.waiting import until

from jobs.telling_source import TellingSource
from stoker import Cache, Feed  # now, and not in each of the processes
from stoker.jobs import board
from stoker.jobs.board import JobTable, Kind
from stoker.jobs.survey import survey
from stoker.node.locks import is_locked
from stoker.policy.baselines import LRU
from stoker.source import MemorySource
from stoker.store.registry import SharedArena, open_arena

MANY = 130  # more than are looked at in one glance, and than four times as many as once were known


def opened() -> SharedArena:
    return open_arena("many", 2 * MANY, 1 << 20, 100, LRU().regions())


def member(number: int, orders: socket.socket) -> None:
    """Join, claim a sample, and stay until told to leave."""
    with opened() as shared, JobTable("many", 2 * MANY) as table:
        slot = table.take(number + 1, Kind.TIME, f"job {number}", 1.5)
        claimed = shared.arena.claim(np.array([number], np.uint32))
        orders.send(b"%d %d" % (-1 if slot is None else slot, claimed[0]))
        orders.recv(1)
        arena = shared.arena
        arena.put_many(np.array([number], np.uint32), [b"%d" % number])


@contextmanager
def forked(
    number: int, act: Callable[[int, socket.socket], None]
) -> Iterator[list[tuple[int, socket.socket]]]:
    """Fork so many small processes that ``act`` at the same time; of each its pid and a socket."""
    there: list[tuple[int, socket.socket]] = []
    try:
        for each in range(number):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                try:
                    act(each, theirs)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            theirs.close()
            ours.settimeout(60)
            there.append((pid, ours))
        yield there
    finally:
        for pid, ours in there:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ours.close()


@contextmanager
def members() -> Iterator[list[tuple[int, socket.socket, int]]]:
    """Let MANY processes join, and yield of each its pid, a socket and its slot."""
    with forked(MANY, member) as there:
        told = [list(map(int, ours.recv(64).split())) for _, ours in there]
        assert all(claimed == 1 for _, claimed in told)
        yield [(*each, slot) for each, (slot, _) in zip(there, told, strict=True)]


def test_a_hundred_and_thirty_join_half_are_killed_and_all_they_held_comes_back() -> None:
    with opened() as shared, JobTable("many", 2 * MANY) as table, members() as there:
        arena, jobs = shared.arena, table.board
        assert sorted(slot for _, _, slot in there) == list(range(MANY))
        assert len(jobs.owners()) == MANY
        assert not arena.claim(np.arange(MANY, dtype=np.uint32)).any()

        dead, living = there[::2], there[1::2]
        for pid, _, _ in dead:
            os.kill(pid, signal.SIGKILL)
        left = sorted(slot for _, _, slot in living)
        until(lambda: sorted(jobs.owners().tolist()) == left)
        until(lambda: arena.reclaim() or arena.stats()["reclaimed"] == len(dead))
        arena.verify()
        claimed = arena.claim(np.arange(MANY, dtype=np.uint32))
        assert claimed.tolist() == [number % 2 == 0 for number in range(MANY)]

        # Rows of the dead are given to those who come.
        assert table.take(1000, Kind.TIME, "new", 1.5) == min(slot for _, _, slot in dead)
        for _, ours, _ in living:
            ours.send(b".")
        until(lambda: jobs.owners().tolist() == [table.slot])
        found = arena.get_many(np.arange(1, MANY, 2, dtype=np.uint32))
        assert found[2].all()
        assert bytes(found[0]) == b"".join(b"%d" % n for n in range(1, MANY, 2))


def feed(source: TellingSource, seed: int, orders: socket.socket) -> None:
    """Be a job: two epochs, each begun only when told to, with all bytes checked."""
    cache = Cache("100%", prefetch=0)
    with Feed(source, 10, recipe="belady", cache=cache, seed=seed, decode_threads=1) as job:
        for _ in range(2):
            next(iter(job))
            orders.send(b"there")
            orders.recv(1)
            for batch in job:
                assert batch.data == [b"%04d" % number for number in batch.ids]
        orders.send(b"%d" % job.stats.fetched)
        orders.recv(1)


def test_forty_jobs_read_for_each_other() -> None:
    source = TellingSource(MemorySource([b"%04d" % number for number in range(100)]), 1e5)
    jobs = forked(40, lambda number, orders: feed(source, number, orders))
    with jobs as there:
        for _ in range(2):
            for _, ours in there:
                assert ours.recv(64) == b"there"
            [cache] = survey()
            assert len(cache.jobs) == 40
            for _, ours in there:
                ours.send(b".")
        fetched = [int(ours.recv(64)) for _, ours in there]
        # A process that is kept from the lock for 50 ms reads for itself; without others' help each
        # of the forty jobs would read a hundred.
        assert 100 <= sum(fetched) == source.given.array[0] < 200


def test_a_table_that_is_closed_looks_no_more_and_still_tells_who_lives() -> None:
    with JobTable("closed", 3) as table, JobTable("closed", 3) as other:
        table.take(1, Kind.TIME, "", 1.5)
        other.take(2, Kind.TIME, "", 1.5)
        table.close()
        table.board.head["looked"] = np.inf  # it would look now, and keep others from it
        assert table.board.owners().tolist() == other.board.owners().tolist() == [other.slot]
        table.board.head["looked"] = np.inf
        assert table.board.live().tolist() == [False, True] + [False] * (board.SLOTS - 2)
        assert table.board.head["looked"][0] == np.inf


def test_one_process_looks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counting(fd: int, *, start: int, length: int) -> bool:
        looked.append(start)
        return is_locked(fd, start=start, length=length)

    monkeypatch.setattr(board, "is_locked", counting)
    monkeypatch.setattr(board, "_GLANCE", 1e6)
    tables = [JobTable("looked", 3) for _ in range(20)]
    try:
        for number, table in enumerate(tables):
            table.take(number + 1, Kind.TIME, "", 1.5)
        looked.clear()
        tables[0].board.head["looked"] = np.inf  # as if it had been long ago
        for table in tables:
            assert len(table.board.live().nonzero()[0]) == 20
        assert sorted(looked) == list(range(1, 20))  # twenty that looked would be 380
    finally:
        for table in tables:
            table.close()


def test_a_table_of_ten_million_samples_takes_memory_only_for_what_is_written() -> None:
    with JobTable("large", 10_000_000) as table:
        slot = table.take(1, Kind.TIME, "", 1.5)
        assert slot is not None
        table.board.next_use[slot, :1000] = 7
        taken = {name: os.fstat(each.fileno()) for name, each in table._arrays.arrays.items()}
        assert taken["next_use"].st_size > 10**10
        assert sum(each.st_blocks * 512 for each in taken.values()) < 1 << 20
