"""`stoker ls` and `stoker clean` in a runtime directory of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from click.testing import CliRunner

from stoker.cli.root import root
from stoker.policy.lru import LRU
from stoker.store.registry import open_arena

HOLDER = """
import sys, time
from stoker.policy.lru import LRU
from stoker.store.registry import open_arena
shared = open_arena("left", 100, 1 << 20, 1000, LRU().regions())
print("open", flush=True)
time.sleep(60)
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
