"""Looking at caches and jobs again and again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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

    def ask(path: Path) -> Any:
        asked.append(path)
        return inquire(path)

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
