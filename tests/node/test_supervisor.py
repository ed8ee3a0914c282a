"""A supervisor that cannot be had costs a warning, and nothing else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import processes_of
from support.waiting import await_true

from stoker._core import BUILD
from stoker.node import descriptors
from stoker.node import supervisor as supervising
from stoker.node.locks import try_lock_file
from stoker.node.messages import Channel
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.node.supervised import pid_namespace
from stoker.node.supervisor import Forerunner, Silence, Supervisor, kill_holder


def warned(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return await_true(lambda: text in caplog.text, 20)


def test_a_runtime_directory_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").symlink_to(tmp_path)
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    with caplog.at_level(logging.WARNING, "stoker"):
        supervisor = Supervisor(
            "help", "stoker.prefetch.process", "key", dict, lambda channel: None
        )
        assert warned(caplog, "help is not available, workers read")
    supervisor.tell({"order": "anything"})
    supervisor.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_process_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "stoker"):
        supervisor = Supervisor("help", "stoker.no.such.module", "key", dict, lambda channel: None)
        assert warned(caplog, "the help process ")  # dies again and again, or does not answer
    supervisor.close()
    supervisor.close()


def test_workers_can_be_forked_while_the_process_comes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "slow_to_come_up.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def coming_up() -> list[int]:
        return processes_of("slow_to_come_up", tmp_path)

    supervisor = Supervisor("help", "slow_to_come_up", "key", dict, lambda channel: None)
    assert await_true(coming_up)
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join()
    (process,) = coming_up()
    os.kill(process, signal.SIGKILL)
    supervisor.close()


STOPS_AT_FIRST = """
import os, pathlib, signal
from stoker.node.supervised import Members, run

class Member:
    def __init__(self, channel):
        self.channel = channel
        self.close = channel.close

def serve(stopped, listener):
    if not pathlib.Path(stopped).exists():
        pathlib.Path(stopped).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    members = Members(listener, Member)
    while not members.are_gone:
        members.attend(0.1)

run(serve)
"""


class Impatient(Silence):
    """Does not wait long for the first word."""

    def __init__(self) -> None:
        super().__init__()
        self._look_at = self._since


def test_one_that_hangs_before_its_first_word_is_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked again and again, and never ended, for only what it says told its number."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(supervising, "Silence", Impatient)
    (tmp_path / "stops_at_first.py").write_text(STOPS_AT_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    stopped, heard = tmp_path / "stopped", []
    supervisor = Supervisor(
        "help", "stops_at_first", "key", lambda: str(stopped), lambda channel: None, heard.append
    )
    assert await_true(lambda: heard)
    first = int(stopped.read_text())
    assert first not in processes_of("stops_at_first", tmp_path)
    assert heard[0]["pid"] != first
    supervisor.close()
    assert await_true(lambda: not processes_of("stops_at_first", tmp_path))


def test_a_full_disk_does_not_keep_a_process_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its number could not be written, and it was taken for one that had failed."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    (tmp_path / "on_a_full_disk.py").write_text(full + STOPS_AT_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    heard: list[dict[str, object]] = []
    with caplog.at_level(logging.INFO, "stoker"):
        supervisor = Supervisor(
            "help", "on_a_full_disk", "key", lambda: str(tmp_path), lambda _: None, heard.append
        )
        assert await_true(lambda: heard)
        supervisor.close()
    assert "did not start" not in caplog.text


NOTES_ITS_START = """
import os, pathlib
with pathlib.Path(__file__).with_suffix(".started").open("a") as file:
    file.write("once ")
"""


@pytest.fixture
def attending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module ``attends``, which is made of this, notes each start of it."""
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "attends.py").write_text(NOTES_ITS_START + STOPS_AT_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "attends.started"


def test_a_forerunner_becomes_the_process(tmp_path: Path, attending: Path) -> None:
    def supervised(forerunner: Forerunner) -> Supervisor:
        heard: list[dict[str, object]] = []
        supervisor = Supervisor(
            "help",
            "attends",
            "key",
            lambda: str(tmp_path),
            lambda channel: None,
            heard.append,
            forerunner=forerunner,
        )
        assert await_true(lambda: heard)
        return supervisor

    first = supervised(Forerunner("attends"))
    assert attending.read_text() == "once ", "nothing else was started"
    (process,) = processes_of("attends", tmp_path)
    second = supervised(Forerunner("attends"))
    assert processes_of("attends", tmp_path) == [process], "one that is not needed has ended"
    first.close()
    second.close()


def test_a_forerunner_that_gets_no_job_is_ended_by_who_started_it(
    tmp_path: Path, attending: Path
) -> None:
    forerunner = Forerunner("attends")
    assert await_true(attending.exists)
    worker = multiprocessing.get_context("fork").Process(target=forerunner.close)
    worker.start()
    worker.join()
    assert len(processes_of("attends", tmp_path)) == 1
    forerunner.close()
    forerunner.close()
    assert not processes_of("attends", tmp_path)


def test_only_who_holds_the_lock_is_ended(tmp_path: Path) -> None:
    lock_path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lock_path.write_text(f"{process.pid} {pid_namespace()}")
        kill_holder(lock_path)  # nobody does: the number may be anybody's by now
        lock = try_lock_file(lock_path)
        assert lock is not None
        lock_path.write_text(f"{process.pid} {pid_namespace() + 1}")
        kill_holder(lock_path)
        lock_path.write_text("")  # it is just starting
        kill_holder(lock_path)
        assert process.poll() is None
        lock_path.write_text(f"{process.pid} {pid_namespace()}")
        kill_holder(lock_path)
        assert process.wait() == -signal.SIGKILL
        descriptors.drop(lock)


def test_another_build_of_stoker_has_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "slow_to_come_up.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def supervised() -> Supervisor:
        return Supervisor("help", "slow_to_come_up", "key", dict, lambda channel: None)

    def coming_up() -> list[int]:
        return processes_of("slow_to_come_up", tmp_path)

    ours = supervised()
    assert await_true(coming_up)
    first = coming_up()
    monkeypatch.setattr("stoker.node.supervisor.BUILD", BUILD | {"version": "0.9"})
    theirs = supervised()
    assert await_true(lambda: len(coming_up()) == 2)
    for supervisor, processes in ((ours, first), (theirs, set(coming_up()) - set(first))):
        for process in processes:
            os.kill(process, signal.SIGKILL)
        supervisor.close()


def test_a_long_path_to_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket's address holds 107 bytes only."""
    folder = tmp_path / ("long" * 30)
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(folder))
    prepare_runtime_dir()
    listener = Channel.listen(folder / "socket")
    channel = Channel.connect(folder / "socket")
    channel.send({"order": "anything"})
    accepted = Channel(listener.accept()[0])
    assert accepted.receive() == ({"order": "anything"}, [])
    accepted.close()
    channel.close()
    listener.close()


# --- what counts as hung ---


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    """The pid of a process that runs some code, after its first line."""
    code = f"print(flush=True)\n{request.param}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
        running.kill()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What is seen of processes, soon after they fell silent and then often."""
    seen: list[tuple[int, bool]] = []
    really = supervising._doings

    def doings(pid: int) -> tuple[int, bool]:
        seen.append(really(pid))
        return seen[-1]

    monkeypatch.setattr(supervising, "_doings", doings)
    monkeypatch.setattr(supervising, "_SILENCE", 0.05)
    monkeypatch.setattr(supervising, "ALIVE_EVERY", 0.05)
    return seen


BUSY = "while True: pass"
WAITING = "import signal; signal.pause()"
BUSY_IN_A_THREAD = f"import threading\nthreading.Thread(target=exec, args=({BUSY!r},)).start()"


@pytest.mark.parametrize("process", [BUSY, BUSY_IN_A_THREAD], indirect=True)
def test_a_slow_process_on_a_busy_machine_is_not_taken_for_a_hung_one(
    process: int, looks: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence()
    silence.end(process)
    while len(looks) < 10:
        assert not silence.is_hung()
    monkeypatch.setattr(supervising, "_PATIENCE", 0.1)  # it may turn in a circle
    assert await_true(silence.is_hung)


@pytest.mark.parametrize("process", [BUSY], indirect=True)
def test_a_stopped_process_is_hung_until_it_speaks_again(
    process: int, looks: list[tuple[int, bool]]
) -> None:
    silence = Silence()
    silence.end(process)
    os.kill(process, signal.SIGSTOP)
    assert await_true(silence.is_hung)
    silence.end(process)
    assert not silence.is_hung()


@pytest.mark.parametrize("process", [WAITING], indirect=True)
def test_a_process_that_waits_for_what_never_comes_is_hung(
    process: int, looks: list[tuple[int, bool]]
) -> None:
    silence = Silence()
    assert not silence.is_hung()  # it is starting
    silence.end(process)
    assert await_true(silence.is_hung)
    assert len(looks) >= 2


def test_nothing_is_seen_of_a_process_of_another_namespace(
    looks: list[tuple[int, bool]],
) -> None:
    silence = Silence()
    silence.end(0)
    assert await_true(silence.is_hung)
    assert not looks
