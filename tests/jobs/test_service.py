"""The node's service: real processes, real sockets, clients of every kind."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.caches import gathered
from support.parts import number_of, numbers
from support.processes import run_python
from support.servers import refuses
from support.services import serving
from support.waiting import until

from stoker.errors import CapacityError, ConfigError
from stoker.jobs.metrics import exposition
from stoker.jobs.protocol import MAX_REQUEST, VERSION, Refused, ask, service_path
from stoker.jobs.service import Service, ServiceSettings
from stoker.jobs.survey import survey
from stoker.node import messages
from stoker.policy.baselines import LRU
from stoker.policy.next_use import NextUse
from stoker.pytorch import Loader, SampleDataset
from stoker.store.registry import open_arena

REGIONS = LRU().regions()


def loader(**options: Any) -> Loader:
    options = {"batch_size": 10, "cache": "20%", "prefetch": 0, "recipe": "lru"} | options
    return Loader(SampleDataset(numbers(200), number_of), **gathered(options))


def serve_in_a_process(*arguments: str) -> subprocess.Popen[str]:
    program = "from stoker.cli.root import root; root()"
    command = [sys.executable, "-c", program, "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "serving" in process.stdout.readline()
    return process


def held() -> list[str]:
    return [cache.key for cache in survey()]


# --- between jobs ---


def test_a_cache_outlives_its_job_and_the_next_one_finds_it_full() -> None:
    with serving() as service:
        with loader(recipe="minio") as one:
            list(one)
            first = one.stats.fetched
            until(service.holding.keys)
        until(lambda: len(held()) == 1)  # who answers for it changes
        with loader(recipe="minio") as two:
            list(two)
            assert first == 200
            assert two.stats.hits > 0
    assert held() == []


def test_without_a_service_the_cache_goes_with_its_job() -> None:
    with loader() as one:
        list(one)
    assert held() == []


def test_jobs_go_on_when_it_is_killed_and_the_next_one_finds_their_caches() -> None:
    first = serve_in_a_process()
    with loader() as one:
        iterator = iter(one)
        got = [next(iterator) for _ in range(3)]
        key = one._session.setup.key
        until(lambda: any(c["key"] == key for c in ask("list")["caches"]))
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert first.stdout is not None
        first.stdout.close()
        got += [next(iterator) for _ in range(3)]
        second = serve_in_a_process()
        try:
            until(lambda: ask("list")["memory_bytes"])
            got += list(iterator)
            assert sorted(i for batch in got for i in batch.tolist()) == list(range(200))
            one.close()
            until(lambda: held() == [key])
            until(lambda: ask("list")["idle"] == [key])
        finally:
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0
            assert second.stdout is not None
            second.stdout.close()
    assert held() == []


INTERRUPTED = """
import signal, sys
from stoker.jobs.service import Service

def at_line(number):  # of those that run from when the service first waits
    lines = []
    def call(frame, event, argument):
        is_waiting = frame.f_back.f_code is Service.run.__code__ and frame.f_code.co_name == "wait"
        return line if is_waiting or lines else None
    def line(frame, event, argument):
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == number + 1:
                signal.raise_signal(signal.SIGTERM)
        return line
    return call

for number in range(16):
    with Service() as service:
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        sys.settrace(at_line(number))
        service.run()
        sys.settrace(None)
print("ended each time")
"""


def test_a_signal_that_comes_while_the_service_waits_ends_it(tmp_path: Path) -> None:
    """What the signal interrupted held the lock of the event that its handler was to set."""
    done = run_python("-c", INTERRUPTED, folder=tmp_path, timeout=60)
    assert done.stdout == "ended each time\n", done.stderr


def test_there_is_one_at_a_time() -> None:
    with serving(), pytest.raises(ConfigError, match="runs already"):
        Service()


# --- bounds ---


def test_an_idle_cache_makes_room_and_one_in_use_does_not() -> None:
    mib = 1 << 20
    with serving(memory=12 * mib) as service:
        admit = service.holding.admit
        with open_arena("first", 100, 8 * mib, 1000, REGIONS):
            until(service.holding.keys)
            room = admit("second", 8 * mib, 8 * mib, [])
            assert room is not None
            assert 0 <= room < 4 * mib
        until(lambda: len(held()) == 1)
        assert admit("second", 8 * mib, 8 * mib, []) is None
        assert held() == []
        # What was admitted counts before it is there.
        assert admit("third", 8 * mib, 8 * mib, []) is not None


def test_a_job_gets_a_smaller_cache_or_a_clear_error() -> None:
    everything = int(numbers(200).sizes.sum())
    with loader(cache="100%") as one:
        iter(one)
        assert one.cache is not None
        arena: Any = one.cache.store.tier.arena  # type: ignore[attr-defined]
        needed = arena.overhead_bytes + arena.capacity_bytes
    less = pytest.warns(RuntimeWarning, match="no room for more")
    with serving(memory=needed - everything // 2), less, loader(cache="100%") as one:
        assert len(list(one)) == 20
        assert one.cache is not None
        held_bytes = one.cache.store.tier.stats()["capacity_bytes"]
        assert everything * 0.2 < held_bytes < everything
    with serving(memory=10), loader() as one, pytest.raises(CapacityError, match="--memory"):
        iter(one)


def test_an_idle_cache_of_another_policy_gives_way() -> None:
    with serving() as service:
        for recipe in ("lru", "belady"):
            with loader(recipe=recipe) as one:  # would warn of another job's policy
                list(one)
                assert one.stats.hits == 0
                until(service.holding.keys)
        with loader(recipe="belady", seed=1) as one:
            list(one)
            assert one.stats.hits > 0


def test_an_idle_cache_is_let_go_after_a_while() -> None:
    with serving(keep=0.3):
        with open_arena("short", 100, 1 << 20, 1000, REGIONS):
            until(lambda: ask("list")["memory_bytes"])
        until(lambda: held() == [])


def test_disk_caches_are_bounded_and_remembered(tmp_path: Path) -> None:
    def job(name: str) -> int:
        with loader(disk=tmp_path / name, disk_size="50%") as one:
            list(one)
            return int(one.stats.fetched)

    with serving(disk=1 << 40) as service:
        assert job("one") == 200
        size = service.holding.limits()["disk_bytes"]
        assert size
    with serving(disk=size + 10) as service:
        assert service.holding.limits()["disk_bytes"] == size
        job("one")
        with pytest.warns(RuntimeWarning, match="no disk cache"):
            job("two")


# --- clients ---


def said_to(data: bytes, *, wait: float = 5.0) -> bytes:
    """Return all that the service answers to raw bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(wait)
        connection.connect(str(service_path()))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


BAD = {
    "garbage": b"\xff\x00 no json\n",
    "nothing": b"",
    "cut short": b'{"stoker": 1, "ask"',
    "a list": b"[1, 2]\n",
    "another version": b'{"stoker": 99, "ask": "list"}\n',
    "no version": b'{"ask": "list"}\n',
    "too much": b'{"stoker": 1, "ask": "' + b"x" * MAX_REQUEST + b'"}\n',
    "deep": b"[" * 60_000 + b"\n",
    "unknown": b'{"stoker": 1, "ask": "rm"}\n',
    "odd values": b'{"stoker": 1, "ask": "admit", "name": 3}\n',
    "negative": b'{"stoker": 1, "ask": "admit_disk", "path": "/x", "size": -1}\n',
    "a truth": b'{"stoker": 1, "ask": "admit_disk", "path": "/x", "size": true}\n',
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\n",
}


@pytest.fixture(scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Serve many tests in a directory of their own."""
    folder = tmp_path_factory.mktemp("served") / "run"
    before = os.environ.get("STOKER_RUNTIME_DIR")
    os.environ["STOKER_RUNTIME_DIR"] = str(folder)
    try:
        with serving():
            yield folder
    finally:
        if before is None:
            os.environ.pop("STOKER_RUNTIME_DIR", None)
        else:
            os.environ["STOKER_RUNTIME_DIR"] = before


@pytest.fixture
def there(one_service: Path, monkeypatch: pytest.MonkeyPatch, _own_runtime_dir: None) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(one_service))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kind", BAD)
def test_a_client_that_talks_nonsense_is_refused_and_harms_nobody(kind: str) -> None:
    answer = said_to(BAD[kind])
    if answer:
        message = json.loads(answer)
        assert message["stoker"] == VERSION
        assert "refused" in message
    assert ask("list")["pid"] == os.getpid()


@pytest.mark.usefixtures("there")
def test_clients_that_say_nothing_do_not_keep_others_from_being_heard() -> None:
    silent = []
    try:
        for _ in range(20):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(service_path()))
            silent.append(connection)
        slow = socket.socket(socket.AF_UNIX)
        slow.connect(str(service_path()))
        silent.append(slow)
        slow.sendall(b'{"stoker"')  # and then a byte now and then
        assert ask("list")["pid"] == os.getpid()
        begin = time.monotonic()
        while time.monotonic() - begin < 30:
            try:
                slow.sendall(b" ")
            except OSError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("a slow client was never cut off")
        for connection in silent[:-1]:
            connection.settimeout(10)
            assert connection.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.usefixtures("there")
def test_more_clients_than_threads_are_turned_away_and_later_ones_heard() -> None:
    many = []
    try:
        for _ in range(60):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(10)
            many.append(connection)
            try:
                connection.connect(str(service_path()))
            except BlockingIOError:  # too many wait to be let in
                many.pop().close()
        assert all(connection.recv(1) == b"" for connection in many)  # none for ever
    finally:
        for connection in many:
            connection.close()
    assert ask("list")["pid"] == os.getpid()


def test_who_asks_judges_the_answer(tmp_path: Path) -> None:
    for answer in (b"", b"hello\n", b'{"stoker": 7}\n', b"x" * 100):
        path = tmp_path / f"{len(answer)}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)

            def reply(listener: socket.socket = listener, answer: bytes = answer) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

            thread = threading.Thread(target=reply)
            thread.start()
            with pytest.raises(OSError, match=r"cut short|no JSON|another version"):
                ask("list", path)
            thread.join()


def test_a_job_goes_on_beside_a_service_that_hangs(tmp_path: Path) -> None:
    with loader() as warm:  # the runtime directory is there
        iter(warm)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(service_path()))
        listener.listen(5)  # and nobody accepts
        with loader() as one:
            assert len(list(one)) == 20


# --- users ---

OTHER_USER = """
import os, socket, sys
os.setgroups([int(g) for g in sys.argv[3].split(",") if g])
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as c:
    c.settimeout(5)
    try:
        c.connect(sys.argv[1])
        c.sendall(sys.argv[2].encode() + b"\\n")
        print(c.recv(1 << 20).decode())
    except OSError as error:
        print(type(error).__name__)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def as_nobody(path: Path, question: str, groups: str = "") -> str:
    line = json.dumps({"stoker": VERSION, "ask": question, "path": "/x", "size": 1})
    command = [sys.executable, "-c", OTHER_USER, str(path), line, groups]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_root
def test_another_user_gets_nothing_not_even_where_the_file_lets_him(tmp_path: Path) -> None:
    with serving():
        path = service_path()
        assert path.stat().st_mode & 0o777 == 0o600
        assert as_nobody(path, "list") == "PermissionError"
        for folder in (path, *path.parents[:-1]):
            if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
                folder.chmod(folder.stat().st_mode | 0o777 if folder == path else 0o755)
        assert as_nobody(path, "list") in ("", "BrokenPipeError", "ConnectionResetError")
        path.parent.chmod(0o700)


@needs_root
def test_members_of_the_group_may_look_and_do_nothing_else(tmp_path: Path) -> None:
    group = next(g for g in grp.getgrall() if g.gr_gid not in (0, 65534))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "look.sock"
        with serving(socket=path, group=group.gr_name):
            assert path.stat().st_mode & 0o777 == 0o660
            assert path.stat().st_gid == group.gr_gid
            assert as_nobody(path, "list") == "PermissionError"


@needs_root
def test_a_member_by_his_first_group_is_heard() -> None:
    try:
        group = grp.getgrgid(65534)
    except KeyError:
        pytest.skip("this system has no group 65534")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "look.sock"
        with serving(socket=path, group=group.gr_name):
            assert "caches" in json.loads(as_nobody(path, "list"))
            assert "text" in json.loads(as_nobody(path, "metrics"))
            assert "only the user" in json.loads(as_nobody(path, "admit_disk"))["refused"]


@pytest.mark.parametrize("what", ["a file", "a link", "a folder"])
def test_c8_a_path_that_is_taken_is_left_alone(what: str, tmp_path: Path) -> None:
    path, group = tmp_path / "precious", grp.getgrgid(os.getegid()).gr_name
    make = {
        "a file": lambda: path.write_text("thesis"),
        "a link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "a folder": path.mkdir,
    }
    make[what]()
    before = path.lstat()
    with pytest.raises(ConfigError, match="precious is there already and no socket"):
        Service(ServiceSettings(socket=path, group=group))
    assert os.path.samestat(before, path.lstat())
    assert not service_path().exists()


def test_c8_only_the_services_own_socket_goes_with_it(tmp_path: Path) -> None:
    path, group = tmp_path / "look.sock", grp.getgrgid(os.getegid()).gr_name
    with serving(socket=path, group=group):
        path.unlink()
        path.write_text("somebody's")
    assert path.read_text() == "somebody's"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with serving(socket=path, group=group):
        assert "caches" in ask("list", path)


def test_c7_lookers_take_no_slot_of_our_own_jobs(tmp_path: Path) -> None:
    """Whoever holds all slots would switch the bound off: jobs that get no answer go on."""
    path, group = tmp_path / "look.sock", grp.getgrgid(os.getegid()).gr_name
    with serving(socket=path, group=group, memory=1 << 20), contextlib.ExitStack() as silent:
        for _ in range(40):
            connection = silent.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(path))
            connection.settimeout(30)
        # Connections are heard in order: the last is turned away once all before it are settled.
        assert connection.recv(1) == b""
        assert (
            ask("admit", name="n", memory=2 << 20, capacity=2 << 20, regions=[])["room"] == 1 << 20
        )


def test_c7_metrics_are_read_by_few_at_a_time_and_the_silent_give_way() -> None:
    """Any user of the machine may connect there."""
    with serving(metrics_port=0) as service, contextlib.ExitStack() as silent:
        before = threading.active_count()
        where = "127.0.0.1", int(service.metrics_port or 0)
        first, *_ = [
            silent.enter_context(socket.create_connection(where, timeout=30)) for _ in range(1000)
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{where[1]}/metrics", timeout=60) as answer:
            assert answer.status == 200
        assert first.recv(1) == b""
        until(lambda: threading.active_count() <= before + 8)  # those sent away end a little later
        assert ask("list")["pid"] == os.getpid()


def test_many_of_one_user_are_heard_in_turn_and_not_turned_away(tmp_path: Path) -> None:
    """A job's processes come all at once; who is turned away reads by itself for seconds."""
    path, group = tmp_path / "look.sock", grp.getgrgid(os.getegid()).gr_name
    with serving(socket=path, group=group), contextlib.ExitStack() as coming:
        connections = [coming.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(16)]
        for connection in connections:
            connection.connect(str(path))
            connection.settimeout(60)
        request = json.dumps({"stoker": VERSION, "ask": "list"}).encode() + b"\n"
        for connection in reversed(connections[4:]):  # these are the first that are heard
            connection.sendall(request)
        for connection in connections[:4]:
            connection.sendall(request)
        for connection in connections:
            assert b"caches" in connection.recv(1 << 16)


@needs_root
def test_c7_one_looker_does_not_keep_the_others_from_looking() -> None:
    group = grp.getgrgid(65534)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        path = Path(name) / "look.sock"
        with serving(socket=path, group=group.gr_name), contextlib.ExitStack() as silent:
            for _ in range(40):  # as the owner, who is one looker among others here
                connection = silent.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(path))
            connection.settimeout(30)
            assert connection.recv(1) == b""
            assert "caches" in json.loads(as_nobody(path, "list"))


def test_the_kernel_says_who_asks() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert messages.peer(one) == (os.getpid(), os.geteuid(), os.getegid())
        assert struct.calcsize("iII") == 12


# --- metrics ---

LINE = re.compile(r'[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)*\})? [-+0-9.e]+')


def test_metrics_over_http_are_of_the_format() -> None:
    with serving(metrics_port=0, memory=1 << 40) as service, loader(recipe="belady") as one:
        list(one)
        list(one)
        until(service.holding.keys)
        url = f"http://127.0.0.1:{service.metrics_port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        names = set()
        for line in text.splitlines():
            if not line.startswith("#"):
                assert LINE.fullmatch(line), line
                names.add(re.split(r"[{ ]", line)[0])
        assert {"stoker_cache_hits_total", "stoker_job_benefit", "stoker_job_eligible"} <= names
        assert {"stoker_service_memory_bytes", "stoker_service_memory_limit_bytes"} <= names
        refuses(f"{url}/else", "404")
        assert ask("metrics")["text"].count("# TYPE") == text.count("# TYPE")


def _has_address(host: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind((host, 0))
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_metrics_are_at_the_address_that_was_asked_for(host: str) -> None:
    if host == "::1" and not _has_address(host):
        pytest.skip(f"this machine has no {host}")
    with serving(metrics_port=0, metrics_host=host) as service:
        where = f"[{host}]" if ":" in host else host
        url = f"http://{where}:{service.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"stoker_service_memory_bytes" in answer.read()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", service.metrics_port or 0), 5).close()


def test_metrics_at_an_address_of_another_machine_are_refused() -> None:
    refused = r"cannot listen at 192\.0\.2\.1 .* address of this machine"
    with pytest.raises(ConfigError, match=refused):
        Service(ServiceSettings(metrics_port=0, metrics_host="192.0.2.1"))


@pytest.mark.parametrize(
    ("description", "shown"),
    [
        ("ImageFolder /home/ann/secret project/train", "ImageFolder train"),
        ("ImageFolder s3://bucket/sets/train/", "ImageFolder train"),
        ("disk cache in /mnt/ann/x", "disk cache in x"),
        ("/mnt/ann/x", "x"),
        ("My data", "My data"),
        ("", "k"),
    ],
)
def test_c11_metrics_show_no_folders(description: str, shown: str) -> None:
    """They are to be had by every user of the machine."""
    cache: dict[str, Any] = {"key": "k", "capacity_bytes": 1, "stats": {}, "jobs": []}
    assert exposition([cache | {"description": description}], {}).splitlines()[-1] == (
        f'stoker_cache_capacity_bytes{{cache="{shown}",key="k"}} 1'
    )


# --- refusals ---


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": -1},
        {"disk": -1},
        {"keep": -0.1},
        {"metrics_port": 70_000},
        {"group": "root"},
        {"socket": Path("/x")},
        {"socket": Path("/x"), "group": "no-such-group-here"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(settings)[-1]):
        ServiceSettings(**settings)


def test_a_refusal_is_an_error_of_its_own() -> None:
    with serving(), pytest.raises(Refused, match="nothing is known"):
        ask("dance")


def test_regions_of_policies_pass_through_json() -> None:
    with serving() as service, open_arena("k", 50, 1 << 20, 100, NextUse().regions()):
        until(service.holding.keys)
        assert service.holding.idle() == []
