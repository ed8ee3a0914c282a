"""A command under run_command is told apart from one that was started directly by nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.waiting import until

RUNNER = """
import os, sys
from stoker.tiering.launcher import NotStarted, run_command
try:
    sys.exit(run_command(sys.argv[1:], os.environ, lambda: open("tick", "w").close(), 0.05))
except NotStarted as error:
    print(error, file=sys.stderr)
    sys.exit(error.status)
"""


def start(folder: Path, *command: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", RUNNER, *command],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def run(folder: Path, *command: str, **options: object) -> tuple[int, str, str]:
    process = start(folder, *command, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _has(line: str, number: int) -> bool:
    """Whether a line of /proc/self/status, like ``SigIgn: 0001``, has the signal's bit."""
    return bool(int(line.split()[1], 16) & 1 << (number - 1))


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_exit_status(tmp_path: Path, status: int) -> None:
    assert run(tmp_path, "sh", "-c", f"exit {status}")[0] == status


@pytest.mark.parametrize("name", ["TERM", "INT", "KILL", "SEGV"])
def test_a_command_that_a_signal_ends(tmp_path: Path, name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    assert run(tmp_path, "sh", "-c", f"kill -{name} $$")[0] == 128 + number


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "QUIT"])
def test_signals_are_passed_on(tmp_path: Path, name: str) -> None:
    # The shell handles the signal itself: whoever only dies of it does not print.
    script = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    process = start(tmp_path, "sh", "-c", script)
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[f"SIG{name}"])
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (9, f"got {name}\n")


def test_a_signal_that_nobody_handles_ends_both(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "echo $$; exec sleep 100")
    assert process.stdout
    pid = int(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ignored_signals_mask_and_descriptors_are_inherited(tmp_path: Path) -> None:
    show = "grep -E 'Sig(Blk|Ign)' /proc/self/status; cat <&107"
    (tmp_path / "four").write_text("four")

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        os.dup2(os.open(tmp_path / "four", os.O_RDONLY), 107)

    def outcome(command: list[str]) -> str:
        return subprocess.run(
            command, preexec_fn=prepare, close_fds=False, capture_output=True, text=True,
            timeout=60, check=True, cwd=tmp_path,
        ).stdout  # fmt: skip

    direct = outcome(["bash", "-c", show])
    assert outcome([sys.executable, "-c", RUNNER, "bash", "-c", show]) == direct
    blocked, ignored, four = direct.split("\n")
    assert _has(blocked, signal.SIGUSR2)
    assert _has(ignored, signal.SIGHUP)
    assert four == "four"


def test_broken_pipes_end_a_command_as_usual(tmp_path: Path) -> None:
    assert run(tmp_path, "bash", "-c", "yes | head -1; exit ${PIPESTATUS[0]}")[:2] == (141, "y\n")


def test_what_cannot_be_started(tmp_path: Path) -> None:
    status, _, said = run(tmp_path, "no-such-command")
    assert status == 127 and "no-such-command: command not found" in said
    (tmp_path / "plain").write_text("no program")
    status, _, said = run(tmp_path, "./plain")
    assert status == 126 and "./plain cannot be started" in said


def test_ticks_while_it_runs(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep", "100")
    until((tmp_path / "tick").exists)
    process.terminate()
    process.communicate(timeout=60)


def test_children_ignored_by_who_started_us(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    assert run(tmp_path, "sh", "-c", "exit 3", preexec_fn=ignore)[0] == 3


def test_stopped_and_continued_it_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "echo ready; read line; exit 9", stdin=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "ready\n"
    tick = tmp_path / "tick"
    for _ in range(20):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        tick.unlink(missing_ok=True)
        time.sleep(0.06)  # past the deadline of the wait, which is what goes wrong
        process.send_signal(signal.SIGCONT)
        until(lambda: process.poll() is not None or tick.exists())
    _, err = process.communicate("\n", timeout=60)
    assert (process.returncode, err) == (9, "")
