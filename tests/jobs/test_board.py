"""The table of jobs in shared memory: slots that die with their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.waiting import until

from stoker.jobs.board import SLOTS, JobTable, Kind
from stoker.jobs.member import Member, Sharing
from stoker.jobs.merged import Merged
from stoker.jobs.survey import survey
from stoker.node import descriptors
from stoker.node.locks import try_lock
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena

JOB = """
import signal
from stoker.jobs.board import Kind
from stoker.jobs.board import JobTable
table = JobTable("key 1", 50)
print(table.take(77, Kind.SCORE, "other", 1.5), flush=True)
table.board.value[table.slot] = 1.0
print("there", flush=True)
signal.pause()
"""


def other_job() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    slot = int(process.stdout.readline())
    assert process.stdout.readline() == "there\n"
    return process, slot


def test_a_job_is_seen_until_it_is_killed_and_its_slot_is_free_then() -> None:
    with JobTable("key 1", 50) as table:
        assert table.is_shared
        own = table.take(5, Kind.TIME, "own", 1.5)
        assert own is not None
        process, slot = other_job()
        assert process.stdout is not None
        with process.stdout:
            assert slot != own
            until(lambda: table.board.owners().tolist() == [own, slot])
            assert table.board.kind is Kind.TIME  # that of the first
            assert (table.board.value[slot] == 1).all()
            process.send_signal(signal.SIGKILL)
            process.wait()
        until(lambda: table.board.owners().tolist() == [own])
        with JobTable("key 1", 50) as again:
            assert again.take(6, Kind.TIME, "again", 1.5) == slot
        until(lambda: table.board.owners().tolist() == [own])


def test_a_forked_child_holds_no_slot_of_its_parent() -> None:
    process, slot = other_job()
    assert process.stdout is not None
    with JobTable("key 1", 50) as table, process.stdout:
        taken = table.take(5, Kind.SCORE, "own", 1.5)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b".")
            signal.pause()
            os._exit(0)
        try:
            assert os.read(reading, 1) == b"."  # it has left what it inherited
            table.close()
            with JobTable("key 1", 50) as other:
                until(lambda: other.board.owners().tolist() == [slot])
                assert other.take(9, Kind.SCORE, "new", 1.5) == taken
        finally:
            os.close(reading)
            os.close(writing)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            process.kill()
            process.wait()


@contextmanager
def all_but_one_taken(table: JobTable) -> Iterator[None]:
    """Hold the locks of all rows but the last, as so many processes would."""
    locks = descriptors.reopen(table._arrays["jobs"].fileno())
    try:
        assert try_lock(locks.fileno(), start=0, length=SLOTS - 1)
        yield
    finally:
        descriptors.drop(locks)


def test_more_processes_than_slots_go_without() -> None:
    assert SLOTS == 512
    with JobTable("key 2", 3) as last, JobTable("key 2", 3) as late, all_but_one_taken(last):
        assert last.take(1, Kind.TIME, "", 1.5) == SLOTS - 1
        assert late.take(2, Kind.TIME, "", 1.5) is None


def test_s15_a_process_too_many_is_told_so() -> None:
    with JobTable("key 5", 3) as last, JobTable("key 5", 3) as late, all_but_one_taken(last):
        last.take(1, Kind.TIME, "", 1.5)
        policy = Merged(LRU(), np.ones(3, np.int64))
        with pytest.warns(RuntimeWarning, match=f"^{SLOTS} processes share.*STOKER_NODE"):
            member = Member(late, policy, Sharing(probe=4), token=99, name="late")
        member.begin_epoch(None, 0, 100)
        assert member.probe.count == 0
        assert not member.received(np.array([0]), 0.0)
        member.close()


def test_the_first_rank_speaks_for_its_job() -> None:
    tables = [JobTable("key 3", 3) for _ in range(4)]
    try:
        for table, token in zip(tables, (8, 9, 8, 9), strict=True):
            table.take(token, Kind.TIME, "", 1.5)
        assert tables[3].board.owners().tolist() == [0, 1]
        tables[0].close()
        until(lambda: tables[3].board.owners().tolist() == [1, 2])
    finally:
        for table in tables:
            table.close()


def test_a_position_is_told_from_one_four_billion_accesses_before() -> None:
    with JobTable("key 4", 3) as table:
        slot = table.take(1, Kind.TIME, "", 1.5)
        assert slot is not None
        now = 5 * 2**32 - 2
        board = table.board
        board.jobs["position"][slot] = now
        board.next_use[slot] = (np.array([now, now + 7, now - 3]) % 2**32).astype(np.uint32)
        found = board.positions(np.array([slot]), np.arange(3, dtype=np.uint32))
        assert found.tolist() == [[now, now + 7, now - 3]]


def test_a_survey_shows_ranks_as_one_job_beside_their_cache() -> None:
    with open_arena("key", 3, 1 << 20, 10, LRU().regions(), description="/data") as shared:
        inode = os.fstat(shared.arena.handle.fds[0]).st_ino
        tables = [JobTable(f"key {inode}", 3) for _ in range(3)]
        try:
            for table, token in zip(tables, (8, 8, 9), strict=True):
                slot = table.take(token, Kind.SCORE, f"job {token}", 1.5)
                row = table.board.jobs[slot]
                row["accesses"], row["hits"], row["gain"] = 100, 25, 2.0 if token == 8 else 1.0
                row["rate"] = 30.0 if token == 8 else 10.0
            [cache] = survey()
            assert cache.description == "/data"
            assert [job.name for job in cache.jobs] == ["job 8", "job 9"]
            assert [job.processes for job in cache.jobs] == [2, 1]
            assert [job.accesses for job in cache.jobs] == [200, 100]
            assert [job.eligible for job in cache.jobs] == [True, False]
            assert [job.share for job in cache.jobs] == pytest.approx([0.75, 0.25])
        finally:
            for table in tables:
                table.close()
        assert survey()[0].jobs == []
