"""Jobs, users and process namespaces around one machine's caches: no collision, no leak."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import await_true

from stoker.errors import UntrustedPath
from stoker.node import rendezvous
from stoker.node.runtime_dir import MARKER, runtime_dir
from stoker.policy import LRU
from stoker.store.registry import clean, list_arenas, open_arena
from survival.job import play
from survival.payloads import NUM_IDS, packed, wrong
from survival.roles import put_only
from survival.support import CAPACITY, Fleet, holders_of, inode, stop_inside_the_lock

_NOBODY = 65534
_KEY = "a data set"
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Job:
    """A program with its part in the arena; ended when the ``with`` statement ends."""

    def __init__(self, *prefix: str, key: str = _KEY) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "survival.job", key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.opened: dict[str, Any] = self._answer()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, verb: str, *ids: int) -> list[bool]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([verb, *map(str, ids)]) + "\n")
        self._process.stdin.flush()
        answers: list[bool] = self._answer()
        return answers

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has a folder that other users may reach, and leaves no memory and no file there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("STOKER_RUNTIME_DIR", str(folder / "mine"))
        yield folder
        deadline = time.monotonic() + 10
        while _left_over() and time.monotonic() < deadline:
            clean()
        assert _left_over() == []


def _left_over() -> list[str]:
    folder = runtime_dir()
    return [p.name for p in folder.iterdir() if p.name != MARKER] if folder.is_dir() else []


def test_two_jobs_share_and_survive_each_other() -> None:
    with Job() as first, Job() as second:
        assert first.opened["created"] and not second.opened["created"]
        memory = first.opened["inode"]
        assert second.opened["inode"] == memory
        assert first.ask("put", 1, 2) == [True, True]
        assert second.ask("get", 1, 2, 3) == [True, True, False]
        assert first.ask("claim", 7) == [True]
        assert second.ask("claim", 7) == [False]
        first.kill()
        assert second.ask("wait", 7) == [False]
        assert second.ask("claim", 7) == [True]
        with Job() as third:
            assert third.opened["inode"] == memory
            assert third.ask("get", 1, 2) == [True, True]
            second.kill()
            assert third.ask("claim", 7) == [True]
            assert third.ask("put", 7) == [True]
            third.end()
    assert list_arenas() == []
    assert holders_of(memory) == []


def test_a_job_can_join_while_the_owner_of_the_lock_is_stopped(tmp_path: Path) -> None:
    with (
        open_arena(_KEY, NUM_IDS, CAPACITY, 3000, LRU().regions()) as opened,
        Fleet(opened.arena, [put_only], tmp_path) as fleet,
    ):
        fleet.await_start()
        stop_inside_the_lock(fleet, 0, opened.arena)
        with Job() as other:
            assert other.opened["inode"] == inode(opened.arena)
            assert other.ask("claim", 5) == [True]
            assert other.ask("put", 5) == [False]
            fleet.go_on(0)
            fleet.await_rounds([0])
            fleet.finish()
            other.end()


def test_a_killed_job_leaves_nothing_but_files_to_clean() -> None:
    with Job() as job:
        memory = job.opened["inode"]
        job.kill()
    assert holders_of(memory) == []
    assert list_arenas() == []
    assert clean() == 1


# Users


def _as_nobody(folder: Path, sockets: Path, pipe: Connection) -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    os.environ["STOKER_RUNTIME_DIR"] = str(folder)
    try:
        job = [*play(_KEY, iter(["put 1", "get 1 2"]))]
    except UntrustedPath as error:
        job = [str(error)]
    pipe.send([*job, *map(_knock, sockets.glob("*.sock"))])


def _knock(path: Path) -> str:
    """Return what comes of asking a stranger's socket for its arena."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        message, fds, _, _ = socket.recv_fds(connection, 100, 4)
    assert (message, fds) == (b"", [])
    try:
        rendezvous.inquire(path)
    except PermissionError as error:
        return str(error)
    return "it answered"


def _play_nobody(folder: Path, sockets: Path) -> list[Any]:
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    child = context.Process(target=_as_nobody, args=(folder, sockets, end))
    child.start()
    end.close()
    try:
        assert pipe.poll(30)
        answers: list[Any] = pipe.recv()
        return answers
    finally:
        child.kill()
        child.join()
        pipe.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_two_users_never_meet(own_runtime_dir: Path) -> None:
    theirs = own_runtime_dir / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, _NOBODY, _NOBODY)
    with Job() as mine:
        assert mine.ask("put", 2) == [True]
        # Even if the files were open to everybody.
        runtime_dir().chmod(0o755)
        for path in runtime_dir().glob("*.sock"):
            path.chmod(0o777)
        opened, put, got, refused = _play_nobody(theirs, runtime_dir())
        runtime_dir().chmod(0o700)
        assert opened["created"] and opened["shared"] and not opened["warnings"]
        assert opened["inode"] != mine.opened["inode"]
        assert (put, got) == ([True], [True, False])
        assert "served by user 0" in refused
        assert holders_of(opened["inode"]) == []
        assert mine.ask("get", 1, 2) == [False, True]
        mine.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_directory_of_another_user_is_not_used(own_runtime_dir: Path) -> None:
    with Job() as mine:
        [refused] = _play_nobody(runtime_dir(), own_runtime_dir / "nothing")
        assert "belongs to user 0: set STOKER_RUNTIME_DIR" in refused
        mine.end()


# Process namespaces


def _can_unshare() -> bool:
    made = shutil.which("unshare") and subprocess.run([*_UNSHARE, "true"], check=False)
    return bool(made) and made.returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="this machine lets us make no process namespace")
@pytest.mark.parametrize("own_proc", [True, False])
def test_claims_of_the_dead_come_back_across_process_namespaces(own_proc: bool) -> None:
    prefix = _UNSHARE if own_proc else _UNSHARE[:-1]
    with Job(*prefix) as first, Job(*prefix) as second, Job() as outside:  # both with pid 1
        assert first.opened["created"]
        memory = first.opened["inode"]
        assert {second.opened["inode"], outside.opened["inode"]} == {memory}
        assert first.ask("claim", 1, 2, 3) == [True] * 3
        assert second.ask("claim", 3, 4, 5) == [False, True, True]
        assert outside.ask("claim", 1, 4) == [False, False]
        assert first.ask("put", 1) == [True]
        first.kill()
        assert outside.ask("wait", 1, 2, 3) == [True, False, False]
        assert outside.ask("claim", 1, 2, 3, 4, 5) == [False, True, True, False, False]
        second.kill()
        assert outside.ask("wait", 4, 5) == [False, False]
        assert outside.ask("claim", 4, 5) == [True, True]
        outside.end()
    assert holders_of(memory) == []


# Cycles


def _cycle(rounds: int, inodes: list[str]) -> None:
    ids = np.arange(20, dtype=np.uint32)
    for _ in range(rounds):
        with open_arena(_KEY, NUM_IDS, CAPACITY, 3000, LRU().regions()) as opened:
            assert opened.shared
            opened.arena.put_many(ids, packed(ids))
            assert not wrong(ids, opened.arena.get_many(ids))
            inodes.append(inode(opened.arena))


def _held() -> tuple[int, int, int]:
    """Return how many descriptors, mappings of arenas and threads this process has."""
    tasks = Path("/proc/self/task")
    # A thread that was joined may take a moment to be gone.
    await_true(lambda: len(list(tasks.iterdir())) <= threading.active_count(), 10)
    maps = Path("/proc/self/maps").read_text().count("memfd:stoker")
    return len(list(Path("/proc/self/fd").iterdir())), maps, len(list(tasks.iterdir()))


def _cycles_in_threads(threads: int, rounds: int, pipe: Connection) -> None:
    warnings.simplefilter("error")
    _cycle(1, [])
    before, inodes = _held(), []
    workers = [threading.Thread(target=_cycle, args=(rounds, inodes)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pipe.send((before, _held(), inodes))


def test_a_hundred_cycles_at_once_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", 60.0)  # the machine may be busy
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(5)]
    children = [
        context.Process(target=_cycles_in_threads, args=(4, 5, end), daemon=True)
        for _, end in pipes
    ]
    for child in children:
        child.start()
    try:
        for pipe, _ in pipes:
            assert pipe.poll(60)
            before, after, inodes = pipe.recv()
            # Fewer at the end: what this process had inherited from other tests has gone.
            assert all(now <= then for now, then in zip(after, before, strict=True))
            assert len(inodes) == 20
            assert holders_of(*inodes) == []
    finally:
        for child in children:
            child.kill()
            child.join()
        for pipe, end in pipes:
            pipe.close()
            end.close()
    assert list_arenas() == []
    assert _left_over() == []
