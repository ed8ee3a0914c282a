"""`stoker ls` and `stoker clean` in a runtime directory of their own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker.cli.root import root
from stoker.jobs.protocol import VERSION
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena

HOLDER = """
import signal
from stoker.policy.baselines import LRU
from stoker.store.registry import open_arena
shared = open_arena("left", 100, 1 << 20, 1000, LRU().regions())
print("open", flush=True)
signal.pause()
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(root, list(arguments), terminal_width=200)
    assert result.exit_code == 0, result.output
    return result.output


def test_without_caches_both_say_so() -> None:
    assert "no running process shares a cache" in run("ls")
    assert json.loads(run("ls", "--json")) == []
    assert "nothing to remove" in run("clean")


def test_a_shared_cache_is_listed_with_its_counters() -> None:
    regions = LRU().regions()
    with open_arena("key", 100, 1 << 20, 1000, regions, description="/data/train") as shared:
        shared.arena.put(7, b"x" * 1000)
        shared.arena.get(7)
        [info] = json.loads(run("ls", "--json"))
        assert info["description"] == "/data/train"
        assert info["stats"]["entries"] == 1
        table = run("ls")
        assert "/data/train" in table
        assert "100.0%" in table
        assert "nothing to remove" in run("clean")  # it is in use


def test_clean_removes_what_a_killed_process_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "open\n"
        assert len(json.loads(run("ls", "--json"))) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "removed the files of 1 cache" in run("clean")
    assert "nothing to remove" in run("clean")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            {
                "key": "k",
                "description": "\x1b[2J[bold]data",
                "stats": {},
                "capacity_bytes": 1,
                "pid": 7,
                "jobs": [],
            },
            "?[2J[bold]data",
        ),
        ({"key": "k"}, "is no service"),
        ("word", "is no service"),
    ],
)
def test_what_another_service_says_neither_steers_the_terminal_nor_breaks(
    said: object, shown: str, tmp_path: Path
) -> None:
    answer = {
        "stoker": VERSION,
        "pid": 7,
        "memory_bytes": 0,
        "memory_limit_bytes": None,
        "disk_bytes": 0,
        "disk_limit_bytes": None,
        "caches": [said],
    }
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(json.dumps(answer).encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        result = CliRunner().invoke(
            root, ["ls", "--socket", str(tmp_path / "s")], terminal_width=200
        )
        thread.join()
    assert isinstance(result.exception, SystemExit | None)
    assert shown in result.output
    assert "\x1b[2J" not in result.output
