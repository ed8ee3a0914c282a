"""A supervisor that cannot be had costs a warning, and nothing else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from support.processes import processes_of
from support.waiting import await_true

from stoker._core import BUILD
from stoker.node.messages import Channel
from stoker.node.runtime_dir import prepare_runtime_dir
from stoker.node.supervisor import Supervisor


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
