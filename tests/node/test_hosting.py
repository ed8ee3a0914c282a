"""Processes that the service starts for a job: what passes, and what goes wrong."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.containers import need_containers
from support.modules import modules
from support.processes import processes_of, stop
from support.users import OTHER, as_other, needs_two_users
from support.waiting import some_time, until

from stoker.node import child, descriptors, hosting, supervisor
from stoker.node.child import Surroundings
from stoker.node.hosting import (
    HOSTED,
    Given,
    Host,
    hand_over,
    host_path,
    started_by_service,
    taken_over,
)
from stoker.node.locks import is_locked, try_lock_file
from stoker.node.messages import Channel, listen
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.node.supervised import lock_of
from stoker.node.supervisor import Supervisor, kill_holder, start_unless_alive
from stoker.shared import SharedArray

HELPS = """
import fcntl, os, pathlib, sys, time
from stoker.node.supervised import Members, run

LATE = pathlib.Path(__file__).with_name("late")

class Member:
    def __init__(self, channel):
        self.channel = channel
        self.close = channel.close

def serve(job, listener):
    folder, arrays = job
    alone = os.open(folder / "alone", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (folder / "two").touch()
    sums = [int(array.array.sum()) for array in arrays]
    umask = os.umask(0)
    members = Members(listener, Member)
    while not members.are_gone:
        members.attend(0.1)
        members.tell({"sums": sums, "parent": os.getppid(), "folder": os.getcwd(), "umask": umask})
    os.close(alone)

def main():
    while LATE.exists() and "stays" in sys.argv:
        time.sleep(0.01)
    run(serve)
"""
"""A process of which there must never be two; it says what came with its job.

A hosted one does not come up as long as there is a file ``late``.
"""

HOSTS = """
import socket
from stoker.node.hosting import Host, host_path
from stoker.node.messages import listen
from stoker.node.runtime_dir import prepare_runtime_dir

prepare_runtime_dir()
listener, host = listen(host_path(), socket.SOCK_SEQPACKET), Host(["helps"])
print("hosts", flush=True)
while True:
    host.hear(listener.accept()[0])
"""
"""What a service has of it, and nothing else."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "helps.py").write_text(HELPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hosting, "_PATIENCE", 20.0)  # the machine may be busy
    monkeypatch.setattr(hosting, "_COMING_UP", 20.0)
    prepare_runtime_dir()
    return tmp_path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """As it is outside of tests."""
    monkeypatch.undo()
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(place / "run"))
    monkeypatch.syspath_prepend(place)


@pytest.fixture
def host() -> Iterator[Host]:
    """One in this process."""
    with hosting_here() as host:
        yield host


@contextlib.contextmanager
def hosting_here() -> Iterator[Host]:
    host, listener = Host(["helps", "no_such_module"]), listen(host_path(), socket.SOCK_SEQPACKET)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                host.hear(listener.accept()[0])

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield host
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        descriptors.drop(listener)


@contextlib.contextmanager
def hosting_elsewhere() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOSTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hosts\n"
            yield process
        finally:
            process.kill()


class Job:
    """One that wants the process, and what it hears of it."""

    def __init__(self, folder: Path, arrays: list[SharedArray] | None = None) -> None:
        self.heard: list[dict[str, Any]] = []
        self.supervisor = Supervisor(
            "help",
            "helps",
            str(folder),
            lambda: (folder, arrays or []),
            lambda channel: None,
            self.heard.append,
        )

    @property
    def says(self) -> dict[str, Any]:
        """The latest that the process said in full."""
        return next((each for each in reversed(self.heard) if "sums" in each), {})

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()


def helpers(folder: Path) -> list[int]:
    return processes_of("helps", folder)


# --- what passes ---


def numbered(count: int) -> list[SharedArray]:
    return [SharedArray.copy_of(np.full(3, number)) for number in range(count)]


@pytest.mark.parametrize("by_service", [False, True])
def test_any_number_of_descriptors_comes_as_what_it_was(place: Path, by_service: bool) -> None:
    """Their numbers are others there, and many are taken by something else."""
    arrays = numbered(40)
    with hosting_here() if by_service else contextlib.nullcontext(), Job(place, arrays) as job:
        until(lambda: job.says)
        assert job.says["sums"] == [3 * number for number in range(40)]
        assert (job.says["parent"] == os.getpid()) == by_service
    until(lambda: not helpers(place))


def test_the_process_has_the_surroundings_of_the_job_not_of_the_service(
    place: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_JOB", "\udcff=\n")
    with Job(place) as job:
        until(lambda: job.says)
        [process] = helpers(place)
        about = Path("/proc", str(process))
        assert job.says["folder"] == str(Path.cwd())
        assert b"OF_THE_JOB=\xff=\n" in (about / "environ").read_bytes().split(b"\0")
        assert os.getsid(process) == process
        until(lambda: host.count == 1)
    until(lambda: host.count == 0)
    assert not about.exists()  # not even as a zombie


def test_files_of_a_hosted_process_had_the_permissions_of_the_services(place: Path) -> None:
    before = os.umask(0o022)
    try:
        with hosting_elsewhere():
            os.umask(0o027)
            with Job(place) as job:
                until(lambda: job.says)
                assert job.says["umask"] == 0o027
    finally:
        os.umask(before)


LIMITED = """
import resource, sys
from pathlib import Path
from stoker.node import hosting

sys.path.insert(0, sys.argv[1])
hosting._PATIENCE = hosting._COMING_UP = 20.0
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 2_000_000))
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
started = hosting.started_by_service("helps")
print([Path(f"/proc/{name}/limits").read_text() for name in ("self", started.pid)])
started.channel.close()
"""


def test_a_hosted_process_had_the_limits_of_the_service(place: Path) -> None:
    """Of a unit of systemd, 1,024 files, of which a job with many shards may open more."""
    with hosting_elsewhere():
        words = [sys.executable, "-c", LIMITED, str(place)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    own, hosted = ast.literal_eval(done.stdout)
    assert own == hosted
    assert " 1000000 " in own and " 200 " in own
    until(lambda: not helpers(place))


def test_a_hosted_process_has_no_more_than_the_service_may(place: Path) -> None:
    with hosting_elsewhere() as service:
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (500, 1000))
        channel = Channel.connect(host_path(), 20)
        limits = {**Surroundings.told().limits, "RLIMIT_FSIZE": [-1, -1]}
        with child.memory_file(surroundings(limits=limits)) as file:
            channel.send(request(), [file])
        assert channel.receive() is not None
        there = channel.receive()
        assert there is not None
        assert resource.prlimit(there[0]["pid"], resource.RLIMIT_FSIZE)[1] == 1000
        channel.close()
        until(lambda: not helpers(place))


def test_a_job_that_comes_second_joins_the_first_ones_process(place: Path, host: Host) -> None:
    with Job(place) as one:
        until(lambda: one.says)
        [process] = helpers(place)
        with Job(place) as two:
            until(lambda: two.says)
            one.supervisor.close()
            told = len(two.heard)
            until(lambda: len(two.heard) > told + 3)
            assert helpers(place) == [process]
            until(lambda: host.count == 1)
    until(lambda: not helpers(place))


def test_what_is_hosted_is_what_has_a_supervisor() -> None:
    supervised = {
        node.args[1].value
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Supervisor"
        if isinstance(node.args[1], ast.Constant)
    }
    assert supervised == set(HOSTED)


# --- when it fails ---


def test_one_that_dies_is_started_again_by_the_job_itself(place: Path, host: Host) -> None:
    """The service may be where processes are killed: it is not asked twice in a row."""
    with Job(place) as job:
        until(lambda: job.says)
        assert job.says["parent"] == os.getpid()
        [first] = helpers(place)
        until(lambda: host.count == 1)
        os.kill(first, signal.SIGKILL)
        until(lambda: job.says["parent"] != os.getpid())
        until(lambda: host.count == 0)
        assert not Path("/proc", str(first)).exists()
    until(lambda: not helpers(place))


def test_one_that_ends_as_it_comes_up_is_not_waited_for(host: Host) -> None:
    assert started_by_service("no_such_module") is None  # it ends before it says that it is there
    until(lambda: host.count == 0)


@pytest.mark.parametrize("comes", ["late", "never"])
def test_read_ahead_was_lost_where_a_hosted_process_took_its_time(
    place: Path, host: Host, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """The time that the service took was the job's own, which gave up on what came then."""
    monkeypatch.setattr(supervisor, "_PATIENCE", 5.0)
    monkeypatch.setattr(hosting, "_COMING_UP", 6.0 if comes == "never" else 60.0)
    (place / "late").touch()
    begin = time.monotonic()
    with Job(place) as job:
        until(lambda: job.says or time.monotonic() > begin + 5.5)
        if comes == "late":
            (place / "late").unlink()
        until(lambda: job.says)
        assert (job.says["parent"] == os.getpid()) == (comes == "late")
        (place / "late").unlink(missing_ok=True)  # it looks now, and finds that it is too late
        until(lambda: len(helpers(place)) == 1)
    until(lambda: not helpers(place))
    assert not (place / "two").exists()


def test_the_service_dies_and_its_process_goes_on(place: Path) -> None:
    with hosting_elsewhere() as service:
        with Job(place) as job:
            until(lambda: job.says)
            assert job.says["parent"] == service.pid
            [process] = helpers(place)
            service.kill()
            service.wait()
            until(lambda: job.says["parent"] != service.pid)
            with hosting_elsewhere(), Job(place) as another:
                until(lambda: another.says)
                assert helpers(place) == [process]
        until(lambda: not helpers(place))


@pytest.mark.usefixtures("impatient")
def test_a_stopped_service_is_not_waited_for_and_starts_nothing_later(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosting_elsewhere() as service:
        stop(service.pid)
        begin = time.monotonic()
        assert started_by_service("helps") is None
        assert time.monotonic() - begin < hosting._COMING_UP / 2  # 0.25 s where nothing else runs
        with Job(place) as job:
            until(lambda: job.says)
            assert job.says["parent"] != service.pid
            [process] = helpers(place)
            os.kill(service.pid, signal.SIGCONT)
            monkeypatch.setattr(hosting, "_PATIENCE", 20.0)
            started = started_by_service("helps")  # it has seen all others that asked before
            assert started is not None
            assert process in helpers(place)
            started.channel.close()
            until(lambda: helpers(place) == [process])
            told = len(job.heard)
            until(lambda: len(job.heard) > told + 3)
        assert not (place / "two").exists()


@pytest.mark.parametrize("when", ["at once", "as it starts", "when it is there", "half given"])
def test_a_job_that_gives_up_leaves_nothing_behind(place: Path, host: Host, when: str) -> None:
    """Neither a process nor, somewhere on the way, the lock."""
    lock_path = place / "lock"
    lock = try_lock_file(lock_path)
    assert lock is not None
    channel = Channel.connect(host_path(), 20)
    with child.memory_file(surroundings()) as file:
        channel.send(request(), [file])
    if when != "at once":
        assert channel.receive() == ({"starts": "helps"}, [])
    if when in ("when it is there", "half given"):
        received = channel.receive()
        assert received is not None
        assert received[0]["pid"] in helpers(place)
    if when == "half given":
        with child.dumped((place, numbered(3))) as job:
            channel.send({}, job)
    channel.close()
    until(lambda: channel_is_served() and host.count == 0 and not helpers(place))
    descriptors.drop(lock)
    # This process is the host too: what it begins to start has a copy for a moment.
    until(lambda: is_free(lock_path))


def is_free(path: Path) -> bool:
    lock = try_lock_file(path)
    if lock is not None:
        descriptors.drop(lock)
    return lock is not None


def channel_is_served() -> bool:
    """Whether the service has seen all that came before."""
    channel = Channel.connect(host_path(), 20)
    channel.send({})
    answer = channel.receive()
    channel.close()
    return answer is not None


def test_a_process_that_dies_while_it_is_given_its_job_gets_no_lock(
    place: Path, host: Host
) -> None:
    started = started_by_service("helps")
    assert started is not None
    os.kill(started.pid, signal.SIGKILL)
    until(lambda: not Path("/proc", str(started.pid)).exists())  # and nothing of it is open
    until(lambda: host.count == 0)
    lock = try_lock_file(place / "lock")
    assert lock is not None
    ours, theirs = socket.socketpair()
    with ours, theirs, child.dumped(0) as job, pytest.raises(OSError, match=r"Broken|reset"):
        hand_over(started.channel, Given(job, place / "path", theirs.fileno(), lock.fileno()))
    started.channel.close()
    descriptors.drop(lock)
    until(lambda: is_free(place / "lock"))


@pytest.mark.usefixtures("impatient")
def test_there_is_never_more_than_one_whatever_becomes_of_the_service(place: Path) -> None:
    """Jobs come and go while services are stopped, continued, killed and replaced."""
    chance = random.Random(os.getpid())
    for _ in range(4):
        with hosting_elsewhere() as service, contextlib.ExitStack() as stack:
            jobs = []
            for _ in range(3):
                if chance.random() < 0.5:
                    os.kill(service.pid, signal.SIGSTOP)
                jobs.append(stack.enter_context(Job(place)))
                some_time(0, 0.2)
                os.kill(service.pid, chance.choice([signal.SIGCONT, signal.SIGKILL]))
            os.kill(service.pid, signal.SIGCONT)
            for job in jobs:
                until(lambda: job.says)  # noqa: B023
            until(lambda: len(helpers(place)) == 1)  # others may be about to see they are too late
        until(lambda: not helpers(place))
    assert not (place / "two").exists()


STOPS = """
import os, signal, socket, sys
from stoker.node.messages import Channel

def main():
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    channel.send({"pid": os.getpid()})
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""One that hangs before it has looked at what it is given."""


def test_a_hosted_process_that_hung_at_once_kept_the_lock_for_good(place: Path) -> None:
    """Nobody knew its number, and so no job ever had a process again."""
    (place / "helps.py").write_text(STOPS)
    path = place / "run" / "socket"
    with hosting_elsewhere():
        lock_path = lock_of(path)
        assert start_unless_alive("helps", path, lock_path, lambda: 0, asks_service=True) is None
        assert len(helpers(place)) == 1
        assert not is_free(lock_path)
        kill_holder(lock_path)
        until(lambda: is_free(lock_path))
        assert not helpers(place)


def test_one_that_ends_before_its_job_has_been_passed_on_held_up_all_forks(place: Path) -> None:
    """Of a job with very many descriptors: what it did not take filled the connection."""
    (place / "helps.py").write_text("def main(): pass")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = Given([ours.fileno()] * 10_000, place / "path", ours.fileno(), theirs.fileno())
        processes = []

        def start() -> None:
            processes.append(supervisor.Forerunner("helps").become(given))

        threading.Thread(target=start, daemon=True).start()
        until(lambda: processes)
        assert processes[0].wait() == 0


# --- who is turned away ---


def surroundings(**other: Any) -> bytes:
    return json.dumps({**Surroundings.told()._asdict(), **other}).encode()


def request(**other: Any) -> dict[str, Any]:
    return {"build": hosting._build(), "module": "helps", **other}


MISFITS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "another build": (request(build="0.9 abc"), surroundings),
    "no build": ({"module": "helps"}, surroundings),
    "another module": (request(module="os"), surroundings),
    "a list of modules": (request(module=["helps"]), surroundings),
    "no JSON": (request(), lambda: b"\xff\x00"),
    "deep": (request(), lambda: b"[" * 60_000),
    "a list": (request(), lambda: b"[1]"),
    "nothing": (request(), bytes),
    "too long": (request(), lambda: surroundings(environment={"A": "x" * (5 << 20)})),
    "numbers": (request(), lambda: surroundings(environment={"A": 1})),
    "no path": (request(), lambda: surroundings(path=None)),
    "no folder named": (request(), lambda: surroundings(folder=None)),
    "no umask": (request(), lambda: surroundings(umask=None)),
    "no limits": (request(), lambda: surroundings(limits=None)),
    "another limit": (request(), lambda: surroundings(limits={"RLIM_INFINITY": [1, 1]})),
    "half a limit": (request(), lambda: surroundings(limits={"RLIMIT_NOFILE": [1]})),
    "a word for a limit": (request(), lambda: surroundings(limits={"RLIMIT_NOFILE": [1, "1"]})),
    "a great limit": (request(), lambda: surroundings(limits={"RLIMIT_NOFILE": [1, 1 << 80]})),
    "a great umask": (request(), lambda: surroundings(umask=1 << 40)),
    "a zero": (request(), lambda: surroundings(environment={"A": "\0"})),
    "an equals sign": (request(), lambda: surroundings(environment={"A=B": ""})),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_refused_with_the_reason(place: Path, host: Host, kind: str) -> None:
    before = open_files(os.getpid())
    message, content = MISFITS[kind]
    channel = Channel.connect(host_path(), 20)
    with child.memory_file(content()) as file:
        channel.send(message, [file])
    answers = iter(channel.receive, None)
    refused = [each["refused"] for each, _ in answers if "refused" in each]
    channel.close()
    assert len(refused) == 1 and refused[0]
    assert channel_is_served()
    assert helpers(place) == []
    until(lambda: open_files(os.getpid()) <= before)  # some were of the test before


def open_files(process: int) -> int:
    return sum(1 for _ in Path("/proc", str(process), "fd").iterdir())


@pytest.mark.parametrize(
    "other", [{"folder": "/no/such/folder"}, {"python": "/no/such/python"}], ids=str
)
def test_what_cannot_be_run_ends(host: Host, other: dict[str, str]) -> None:
    channel = Channel.connect(host_path(), 20)
    with child.memory_file(surroundings(**other)) as file:
        channel.send(request(), [file])
    assert list(iter(channel.receive, None)) == [({"starts": "helps"}, [])]
    channel.close()
    until(lambda: host.count == 0)


GARBAGE: dict[str, Callable[[socket.socket], object]] = {
    "no JSON": lambda to: to.send(b"\xff\x00"),
    "a list": lambda to: to.send(b"[]"),
    "a pickle": lambda to: to.send(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\n"),
    "no file": lambda to: to.send(json.dumps(request()).encode()),
    "what is never read": lambda to: with_files(to, [os.eventfd(0)]),
    "a folder": lambda to: with_files(to, [os.open("/", os.O_RDONLY)]),
    "three files": lambda to: with_files(to, [os.memfd_create("x") for _ in range(3)]),
    "200 files": lambda to: with_files(to, [os.memfd_create("x") for _ in range(200)]),
    "a file and nothing": lambda to: socket.send_fds(to, [b" "], [0]),
    "nothing": lambda to: to.shutdown(socket.SHUT_WR),
}


def with_files(to: socket.socket, files: Any) -> None:
    socket.send_fds(to, [json.dumps(request()).encode()], list(files))
    for file in files:
        os.close(file)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_harms_nobody(place: Path, kind: str) -> None:
    with hosting_elsewhere() as service:
        before = open_files(service.pid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(str(host_path()))
            GARBAGE[kind](connection)
            assert b"refused" in connection.recv(4096)
        assert helped()
        until(lambda: open_files(service.pid) == before)
        until(lambda: not helpers(place))


def test_clients_that_say_nothing_take_the_places_of_few(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_LISTENING", 600.0)
    silent = [Channel.connect(host_path(), 20) for _ in range(hosting._MOST_STARTING)]
    assert not helped()  # they came first
    for channel in silent:
        channel.close()
    until(helped)


def test_a_client_that_says_nothing_is_not_listened_to_for_long(host: Host) -> None:
    channel = Channel.connect(host_path(), 20)
    answer = channel.receive()
    assert answer is not None and "timed out" in answer[0]["refused"]
    assert channel.receive() is None
    channel.close()


def helped() -> bool:
    """Whether the service starts a process for one who then wants none."""
    started = started_by_service("helps")
    if started is not None:
        started.channel.close()
    return started is not None


NEVER = """
import ctypes, json, os, subprocess, sys
from pathlib import Path

fuse = os.open("/dev/fuse", os.O_RDWR)  # a file system whose server never says a word
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"never", sys.argv[1].encode(), b"fuse", 0, options):
    raise OSError(ctypes.get_errno(), "mount")

from stoker.node import child, hosting
from stoker.node.child import Surroundings
from stoker.node.messages import Channel

def ask(**other):
    channel = Channel.connect(hosting.host_path(), 20)
    around = Surroundings.told()._replace(**other)
    with child.memory_file(json.dumps(around._asdict()).encode()) as file:
        channel.send({"build": hosting._build(), "module": "helps"}, [file])
    hosting._await(channel, 20)
    return channel

sys.path.insert(0, str(Path(sys.argv[1]).parent))
service = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
try:
    service.stdout.readline()
    waiting = [ask(folder=sys.argv[1] + "/here"), ask(python=sys.argv[1] + "/python")]
    hosting._await(ask(), 20)
    print("served")
finally:
    service.kill()
    service.wait()
try:
    Channel.connect(hosting.host_path(), 20)
except ConnectionRefusedError:
    print("ended")
"""


def test_a_folder_that_never_answers_held_up_the_whole_service(place: Path) -> None:
    """No other job was served, and what the service held lived on: its lock and its sockets.

    Also with a Python that lies there.
    """
    need_containers()
    (place / "never").mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    words = [*unshare, sys.executable, "-c", NEVER, str(place / "never"), HOSTS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if "/dev/fuse" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no such file system can be mounted here: {done.stderr[-200:]}")
    assert done.stdout == "served\nended\n", done.stderr
    until(lambda: not helpers(place))


def test_a_fork_in_the_service_kept_a_job_from_seeing_its_process_end(host: Host) -> None:
    channel = Channel.connect(host_path(), 20)
    until(lambda: kept_at(str(host_path())) == 2)  # the service's end, and where it listens
    end, other_end = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(other_end)
        os.read(end, 1)  # it stays until the test is over
        os._exit(0)
    try:
        channel.send({})
        assert [each["refused"] != "" for each, _ in iter(channel.receive, None)] == [True]
        channel.close()
    finally:
        os.close(end)
        os.close(other_end)
        os.waitpid(worker, 0)


def kept_at(address: str) -> int:
    """How many sockets with this address are kept from forks."""
    with descriptors.no_fork:
        kept = [each for each in descriptors._kept if isinstance(each, socket.socket)]
    names = []
    for each in kept:
        with contextlib.suppress(OSError):  # closed by now
            names.append(each.getsockname())
    return names.count(address)


ASKS = """
import logging
from stoker.node import hosting
hosting._PATIENCE = 20.0
logging.basicConfig(level=logging.INFO)
print(hosting.started_by_service("helps"))
"""


@pytest.mark.parametrize("space", ["mount", "net", "pid"])
def test_a_job_in_another_namespace_is_refused(host: Host, space: str) -> None:
    need_containers()
    unshare = ["unshare", "--user", "--map-root-user", f"--{space}", "--fork"]
    done = subprocess.run([*unshare, sys.executable, "-c", ASKS], capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr
    kind = "mnt" if space == "mount" else space
    assert f"another {kind} namespace" in done.stderr or "cannot see" in done.stderr
    assert host.count == 0


@needs_two_users
def test_a_job_of_another_user_is_not_answered(place: Path, host: Host) -> None:
    status = host_path().lstat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid()
    folder = os.open(place / "run", os.O_PATH)
    (place / "run").chmod(0o711)  # what nothing of ours does
    host_path().chmod(0o666)

    def asks() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(f"/proc/self/fd/{folder}/{host_path().name}")
            with contextlib.suppress(BrokenPipeError):
                connection.send(b"{}")
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(4096) == b""

    as_other(asks)
    os.close(folder)
    assert host.count == 0


CONFINED = """
import ctypes, json, struct, subprocess, sys
from pathlib import Path
from stoker.node import child, hosting
from stoker.node.child import Surroundings
from stoker.node.messages import Channel

libc = ctypes.CDLL(None, use_errno=True)

def done(status):
    if status:
        raise OSError(ctypes.get_errno(), "it cannot be done here")

def promise():
    done(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS

def add_filter():
    permits = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(permits)))
    done(libc.prctl(22, 2, program, 0, 0))  # PR_SET_SECCOMP, to a filter which permits all

def bound(capability=0):
    done(libc.prctl(24, capability, 0, 0, 0))  # PR_CAPBSET_DROP, of CAP_CHOWN

def wakes_nobody():  # as what ssh starts, which services of systemd's user instance are not
    bound(35)  # CAP_WAKE_ALARM
    text = Path("/proc/self/status").read_text()
    effective = int(text.split("CapEff:")[1].split()[0], 16)
    sets = [(each & 0xFFFFFFFF, each >> 32) for each in (effective & ~(1 << 35), effective, 1)]
    values = [half[part] for part in (0, 1) for half in sets]
    done(libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *values)))

def asks():
    channel = Channel.connect(hosting.host_path(), 20)
    with child.memory_file(json.dumps(Surroundings.told()._asdict()).encode()) as file:
        channel.send({"build": hosting._build(), "module": "helps"}, [file])
    answer, _ = channel.receive()
    channel.close()
    return answer

before, then = ([globals()[name] for name in each.split()] for each in sys.argv[1:3])
for step in before:
    step()
service = subprocess.Popen([sys.executable, "-c", sys.argv[3]], stdout=subprocess.PIPE)
try:
    service.stdout.readline()
    assert "starts" in asks(), "it has to be hosted as long as it may do the same"
    for step in then:
        step()
    print(asks())
finally:
    service.kill()
    service.wait()
"""
"""A job that confines itself further than its service, after what both have in common."""


@pytest.mark.parametrize(
    ("common", "own"),
    [
        ("", "promise"),
        ("", "bound"),
        ("promise", "add_filter"),
        ("promise add_filter", "add_filter"),
    ],
)
def test_a_hosted_process_could_do_what_its_job_may_not(place: Path, common: str, own: str) -> None:
    """Only effective capabilities and the mode of filters counted, not what a program begins with.

    Who cannot gain privileges may be confined by Landlock too, which nobody sees.
    """
    assert "other groups, capabilities or restrictions" in confined(common, own)
    until(lambda: not helpers(place))


def test_a_job_that_cannot_wake_the_machine_is_hosted(place: Path) -> None:
    """systemd gives that to services of users, and to some of their sessions."""
    assert "starts" in confined("", "wakes_nobody")
    until(lambda: not helpers(place))


def confined(common: str, own: str) -> str:
    """What a service says to a job that has confined itself further."""
    words = [sys.executable, "-c", CONFINED, common, own, HOSTS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if "cannot be done here" in done.stderr:
        pytest.skip(done.stderr[-200:])
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_two_users
@pytest.mark.parametrize("what", ["groups", "capabilities"])
def test_a_job_that_may_read_other_files_is_refused(host: Host, what: str) -> None:
    def asks() -> None:
        if what == "capabilities":
            header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
            assert ctypes.CDLL(None).capset(header, bytes(24)) == 0
        channel = Channel.connect(host_path(), 20)
        with child.memory_file(surroundings()) as file:
            channel.send(request(), [file])
        received = channel.receive()
        assert received is not None and "other groups, cap" in received[0]["refused"]

    groups = [OTHER] if what == "groups" else os.getgroups()
    as_other(asks, user=os.geteuid(), groups=groups)
    assert host.count == 0


# --- giving ---


def test_what_is_cut_short_gives_nothing() -> None:
    ours, theirs = (Channel(each) for each in socket.socketpair(type=socket.SOCK_SEQPACKET))
    with child.dumped(numbered(2)) as job:
        ours.send({}, job)
    ours.close()
    assert taken_over(theirs) is None
    theirs.close()


def test_the_lock_is_held_from_before_the_start_to_the_end(place: Path, host: Host) -> None:
    """So that no other job starts a second one in between."""
    path = place / "run" / "socket"
    seen: list[bool] = []

    def job() -> tuple[Path, list[SharedArray]]:
        with lock_of(path).open() as lock:
            seen.append(is_locked(lock.fileno()))
        return place, []

    assert start_unless_alive("helps", path, lock_of(path), job, asks_service=True) is None
    with lock_of(path).open() as lock:
        assert seen == [True] and is_locked(lock.fileno())
        channel = Channel.connect(path, 20)
        assert channel.receive() is not None
        text = lock.read().split()
        assert [int(text[0])] == helpers(place)
        channel.close()
        until(lambda: not is_locked(lock.fileno()))
    assert not path.exists() and not lock_of(path).exists()
