"""Looking at caches and jobs again and again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from stoker.jobs.board import JobTable, Kind
from stoker.jobs.survey import Watch
from stoker.node import rendezvous
from stoker.policy.baselines import LRU
from stoker.store.registry import SharedArena, open_arena

JOB = """
import sys, signal
from stoker.jobs.board import JobTable, Kind
table = JobTable(f"key {sys.argv[1]}", 3)
table.take(7, Kind.TIME, "other", 1.5)
print("there", flush=True)
signal.pause()
"""


def cache() -> SharedArena:
    return open_arena("key", 3, 1 << 20, 10, LRU().regions())


def inode_of(shared: SharedArena) -> int:
    return os.fstat(shared.arena.handle.fds[0]).st_ino


def test_holders_are_asked_once_and_what_jobs_publish_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Path] = []
    inquire = rendezvous.inquire

    def ask(path: Path, *patience: float) -> Any:
        asked.append(path)
        return inquire(path, *patience)

    monkeypatch.setattr(rendezvous, "inquire", ask)
    watch = Watch()
    assert watch.look() == []
    with cache() as shared, JobTable(f"key {inode_of(shared)}", 3) as table:
        slot = table.take(8, Kind.SCORE, "own", 1.5)
        asked.clear()
        for accesses in (100, 200):
            table.board.jobs["accesses"][slot] = accesses
            [found] = watch.look()
            assert [job.accesses for job in found.jobs] == [accesses]
        assert len(asked) == 2  # the cache and its table
    assert watch.look() == []


def test_a_cache_that_is_made_again_is_another() -> None:
    watch = Watch()
    for name in ("first", "second"):
        with cache() as shared, JobTable(f"key {inode_of(shared)}", 3) as table:
            table.take(8, Kind.SCORE, name, 1.5)
            [found] = watch.look()
            assert [job.name for job in found.jobs] == [name]


def test_a_killed_job_is_gone_at_the_next_look() -> None:
    watch = Watch()
    with cache() as shared:
        command = [sys.executable, "-c", JOB, str(inode_of(shared))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            assert [job.name for job in watch.look()[0].jobs] == ["other"]
            process.send_signal(signal.SIGKILL)
        until(lambda: not watch.look()[0].jobs)


def test_a_row_that_is_none_hides_only_the_jobs_beside_it() -> None:
    with cache() as shared, JobTable(f"key {inode_of(shared)}", 3) as table:
        slot = table.take(8, Kind.SCORE, "own", 1.5)
        table.board.jobs["kind"][slot] = 99
        [found] = Watch().look()
        assert found.jobs == []
        table.board.jobs["kind"][slot] = Kind.TIME
        assert len(Watch().look()[0].jobs) == 1


def test_a_probe_is_of_all_ranks_and_is_over_when_the_last_has_answered() -> None:
    with cache() as shared, contextlib.ExitStack() as stack:
        key = f"key {inode_of(shared)}"
        tables = [stack.enter_context(JobTable(key, 3)) for _ in range(3)]
        slots = [
            table.take(token, Kind.TIME, f"job {token}", 1.5)
            for table, token in zip(tables, (8, 8, 9), strict=True)
        ]
        rows = tables[0].board.jobs
        watch = Watch()
        job = watch.look()[0].jobs[0]
        assert (job.name, job.processes) == ("job 8", 2)

        def answer() -> None:
            for slot, batches, seconds in ((slots[0], 16, 0.5), (slots[1], 9, 0.75)):
                until(lambda slot=slot: rows["probes_wanted"][slot] == 1)
                rows["probe_batches"][slot], rows["probe_seconds"][slot] = batches, seconds
                rows["probes_done"][slot] = 1

        ranks = threading.Thread(target=answer)
        ranks.start()
        assert watch.probe(job, 60) == (9, 0.75)
        ranks.join()
        assert rows["probes_wanted"][slots[2]] == 0, "it is of another job"
        assert watch.probe(job, 0) is None
        assert (rows["probes_wanted"] == rows["probes_done"]).all(), "they are not asked any more"
