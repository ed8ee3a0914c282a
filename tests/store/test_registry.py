"""Many processes, one arena: found, made, handed on, cleaned up after."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from stoker.errors import CapacityError, ConfigError, UntrustedPath
from stoker.node import rendezvous
from stoker.node.runtime_dir import MARKER, prepare_runtime_dir, runtime_dir
from stoker.policy.baselines import LRU, MinIO
from stoker.store.registry import clean, list_arenas, open_arena

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def helpers():
    """Start what multiprocessing keeps for the life of a process, descriptors included."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    FORK.Barrier(2)


@pytest.fixture(autouse=True)
def own_runtime_dir(monkeypatch, tmp_path):
    """A directory of the test's own; nothing may be left in it, nor of threads and descriptors."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "runtime"))
    prepare_runtime_dir()
    gc.collect()
    fds, threads = open_fds(), threading.active_count()
    yield
    gc.collect()
    # Fewer at the end: what other tests left has gone.
    assert open_fds() <= fds
    assert threading.active_count() <= threads
    assert left_over() == []


def open_fds():
    return {path for path in Path("/proc/self/fd").iterdir() if path.exists()}


def left_over():
    return sorted(path.name for path in runtime_dir().iterdir() if path.name != MARKER)


def open_one(key="data", size=MIB, policy=None, **options):
    return open_arena(key, 100, size, 100, (policy or LRU()).regions(), **options)


def identity(shared):
    """Tell arenas apart: the inode of the memory."""
    return os.fstat(shared.arena.handle.fds[0]).st_ino


class Holder:
    """A child process that opens the arena, says which it got, and holds it until told."""

    def __init__(self, context=FORK, **options):
        self.pipe, pipe = context.Pipe()
        self.process = context.Process(target=self._run, args=(pipe, os.environ.copy(), options))
        self.process.start()
        pipe.close()
        self.created, self.shared, self.identity = None, None, None

    def opened(self):
        assert self.pipe.poll(20)
        self.created, self.shared, self.identity = self.pipe.recv()
        return self

    @staticmethod
    def _run(pipe, environment, options):
        os.environ.update(environment)  # a fork server has its own
        shared = open_one(**options)
        pipe.send((shared.created, shared.shared, identity(shared)))
        pipe.recv()
        shared.close()

    def end(self, how="close"):
        if how == "close":
            self.pipe.send(None)
        else:
            self.process.kill()
        self.process.join(60)
        assert self.process.exitcode == (0 if how == "close" else -signal.SIGKILL)
        self.pipe.close()
        self.process.close()


def test_the_first_makes_it_and_the_second_joins():
    with open_one(description="/data") as first, open_one() as second:
        assert (first.created, second.created) == (True, False)
        assert first.shared
        assert second.shared
        first.arena.put(5, b"hello")
        assert second.arena.get(5) == b"hello"
        info = list_arenas()
        assert [(i.key, i.description, i.capacity_bytes, i.pid) for i in info] == [
            ("data", "/data", MIB, os.getpid())
        ]
        assert info[0].stats["entries"] == 1
        assert clean() == 0
    assert list_arenas() == []


def test_keys_are_apart():
    with (
        open_one("a") as first,
        open_one("b" * 5000 + "/\0") as second,
        open_arena("a", 7, MIB, 100, LRU().regions()) as third,
    ):
        assert len({identity(shared) for shared in (first, second, third)}) == 3
        assert [len(info.key) for info in list_arenas()] == [1, 1, 5002]


def test_closing_again_or_forgetting_to_is_harmless():
    shared = open_one()
    shared.close()
    shared.close()
    open_one()
    gc.collect()
    assert list_arenas() == []


def test_an_arena_closed_before_its_keeper_can_still_be_joined():
    first = open_one()
    first.arena.put(5, b"hello")
    first.arena.close()
    with open_one() as second:
        assert second.arena.get(5) == b"hello"
        first.close()
        assert not second.created


def test_another_size_gets_the_existing_one_and_one_warning():
    with open_one(size=2 * MIB) as first:
        with pytest.warns(RuntimeWarning, match=r"2\.0 MiB, not the 1\.0 MiB") as caught:
            second = open_one(size=MIB)
        assert len(caught) == 1
        assert identity(second) == identity(first)
        second.close()


def test_another_policy_gets_the_existing_one_and_one_warning():
    with open_one():
        with pytest.warns(RuntimeWarning, match="another job's policy") as caught:
            open_one(policy=MinIO()).close()
        assert len(caught) == 1


def test_a_private_arena_is_not_found():
    with open_one(share=False) as private, open_one() as shared:
        assert not private.shared
        assert shared.created


def test_sharing_that_fails_gives_a_private_arena_and_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    warned = pytest.warns(RuntimeWarning, match="cannot share this cache.*Not a directory")
    with monkeypatch.context() as patched, warned:
        patched.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "file" / "below"))
        shared = open_one()
    assert not shared.shared
    shared.close()


def test_c10_a_runtime_directory_that_others_may_enter_is_an_error():
    runtime_dir().chmod(0o777)
    with pytest.raises(UntrustedPath, match=r"open to others \(mode 0777\): run `chmod 700"):
        open_one()
    runtime_dir().chmod(0o700)


def test_refused_arguments_leave_nothing_behind():
    with pytest.raises(ConfigError):
        open_arena("data", 0, MIB, 100, LRU().regions())
    with pytest.raises(CapacityError):
        open_one(size=1 << 60)
    assert left_over() == []


def test_when_the_one_who_answers_closes_another_takes_over():
    with open_one() as first:
        holder = Holder().opened()
        first.arena.put(5, b"hello")
    with open_one() as again:
        assert not again.created
        assert again.arena.get(5) == b"hello"
        holder.end()


def test_when_the_one_who_answers_is_killed_another_takes_over():
    server = Holder().opened()
    assert server.created
    with open_one() as mine:
        others = [Holder().opened() for _ in range(3)]
        server.end("kill")
        with open_one() as again:
            assert not again.created
            assert {identity(mine), *(other.identity for other in others)} == {identity(again)}
        for other in others:
            other.end("kill")
        with open_one() as again:
            assert not again.created


def test_what_killed_processes_left_is_used_again_or_cleaned():
    for _ in range(2):
        holder = Holder().opened()
        assert holder.created
        holder.end("kill")
    assert len(left_over()) == 3
    assert list_arenas() == []
    (runtime_dir() / "notes").touch()
    marker = (runtime_dir() / MARKER).rename(runtime_dir() / "elsewhere")
    assert clean() == 0
    marker.rename(runtime_dir() / MARKER)
    assert clean() == 1
    assert left_over() == ["notes"]
    (runtime_dir() / "notes").unlink()


def test_a_hundred_opens_at_once_get_one_arena():
    holders = [Holder() for _ in range(100)]
    for holder in holders:
        holder.opened()
    assert all(holder.shared for holder in holders)
    assert sum(holder.created for holder in holders) == 1
    assert len({holder.identity for holder in holders}) == 1
    for holder in holders:
        holder.pipe.send(None)
    for holder in holders:
        holder.process.join(60)
        assert holder.process.exitcode == 0
        holder.pipe.close()
        holder.process.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_started_in_other_ways_find_it(method):
    with open_one() as mine:
        holder = Holder(multiprocessing.get_context(method)).opened()
        assert holder.identity == identity(mine)
        holder.end()


def cycle(barrier, seen, rounds, seed):
    for number in range(rounds):
        with open_one() as shared:
            barrier.wait(30)
            seen.put((number, identity(shared), shared.shared))
            barrier.wait(30)
            if (seed + number) % 3 == 0:
                time.sleep(0.002 * (seed % 4))


def test_opening_and_closing_all_at_once_again_and_again():
    count, rounds = 10, 10
    barrier, seen = FORK.Barrier(count), FORK.SimpleQueue()
    children = [FORK.Process(target=cycle, args=(barrier, seen, rounds, i)) for i in range(count)]
    for child in children:
        child.start()
    got = [seen.get() for _ in range(count * rounds)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert all(shared for _, _, shared in got)
    for number in range(rounds):
        assert len({inode for n, inode, _ in got if n == number}) == 1
    seen.close()


def test_threads_of_one_process_may_open_at_once():
    opened, start = [], threading.Barrier(10)

    def work():
        start.wait()
        opened.append(open_one())

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({identity(shared) for shared in opened}) == 1
    assert sum(shared.created for shared in opened) == 1
    for shared in opened:
        shared.close()


def test_garbage_and_silence_at_the_socket_disturb_nobody():
    with open_one() as mine:
        address = str(next(runtime_dir().glob("*.sock")))
        if len(address) > 107:
            pytest.skip("the temporary directory's path is too long for a plain address")
        clients = [socket.socket(socket.AF_UNIX) for _ in range(50)]
        for client in clients:
            client.connect(address)
            with contextlib.suppress(BrokenPipeError):
                client.send(os.urandom(1000))
        begin = time.monotonic()
        with open_one() as other:
            assert identity(other) == identity(mine)
        assert time.monotonic() - begin < 2
        for client in clients:
            client.close()


def test_a_stopped_server_costs_newcomers_a_bounded_wait(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    server = Holder().opened()
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match="does not answer"):
        private = open_one()
    assert time.monotonic() - begin < 5
    assert not private.shared
    private.close()
    os.kill(server.process.pid, signal.SIGCONT)
    with open_one() as joined:
        assert identity(joined) == server.identity
        server.end()


def sleep_in_child(pipe):
    open_arena_and_keep = open_one()
    child = os.fork()
    if child == 0:
        signal.pause()
    pipe.send((child, identity(open_arena_and_keep)))
    signal.pause()


def test_orphaned_children_do_not_count_as_holders():
    pipe, end = FORK.Pipe()
    parent = FORK.Process(target=sleep_in_child, args=(end,))
    parent.start()
    orphan, old = pipe.recv()
    parent.kill()
    parent.join()
    begin = time.monotonic()
    try:
        with open_one() as mine:
            assert mine.created
            assert identity(mine) != old
        assert time.monotonic() - begin < 2
    finally:
        os.kill(orphan, signal.SIGKILL)
        for thing in (pipe, end, parent):
            thing.close()


def test_a_child_uses_the_arena_and_its_close_is_its_own():
    with open_one() as mine:
        child = os.fork()
        if child == 0:
            mine.arena.put(5, b"hello")
            mine.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mine.arena.get(5) == b"hello"
        with open_one() as other:
            assert not other.created


def run_python(*prefix, code):
    """Start Python on this module's own functions, with a pipe to talk to."""
    program = f"import sys; sys.path[:0] = {sys.path!r}\nfrom store.test_registry import *\n{code}"
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_leaving_without_closing_removes_the_files():
    with run_python(code="shared = open_one(); print(left_over() != [])") as process:
        assert process.communicate(timeout=30)[0].split() == ["True"]
    assert left_over() == []


def test_process_namespaces_share_one_arena():
    prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("this machine does not let us make a process namespace")
    code = "s = open_one(); print(identity(s), os.getpid(), flush=True); input(); s.close()"
    with run_python(*prefix, code=code) as server:
        inode, pid = map(int, server.stdout.readline().split())
        assert pid == 1, "the first process of its namespace"
        with open_one() as mine:
            assert (mine.created, identity(mine)) == (False, inode)
            mine.arena.put(5, b"hello")
            with run_python(*prefix, code=code) as other:
                assert other.stdout.readline().split() == [str(inode), "1"]
                server.kill()
                server.wait(60)
                with open_one() as again:
                    assert (again.created, again.arena.get(5)) == (False, b"hello")
                other.communicate("\n", timeout=60)
                assert other.returncode == 0


def as_other_user(pipe):
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # /proc/self is the new user's again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_one() as shared:
            pipe.send(
                (shared.created, shared.shared, identity(shared), [str(w.message) for w in caught])
            )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("same_directory", [True, False])
def test_users_never_share(monkeypatch, tmp_path, same_directory):
    with open_one() as mine:
        if not same_directory:
            public = tmp_path / "public"
            public.mkdir()
            public.chmod(0o1777)
            for folder in (tmp_path, *list(tmp_path.parents)[:2]):
                folder.chmod(folder.stat().st_mode | 0o011)
            monkeypatch.delenv("STOKER_RUNTIME_DIR")
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
            monkeypatch.setattr("tempfile.tempdir", str(public))
        pipe, end = FORK.Pipe()
        child = FORK.Process(target=as_other_user, args=(end,))
        child.start()
        end.close()
        created, shared, inode, said = pipe.recv()
        child.join(60)
        assert child.exitcode == 0
        pipe.close()
        child.close()
        assert created
        assert shared is not same_directory
        assert inode != identity(mine)
        assert bool(said) is same_directory
        monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "runtime"))
