"""`stoker top`: figures by hand, real jobs, and a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.parts import number_of, numbers

from stoker.cli.root import root
from stoker.cli.top import Screen
from stoker.cli.view import History, JobView, view_of
from stoker.jobs.metrics import PUBLISHED, WAIT_SECONDS, Waits
from stoker.pytorch import Loader, SampleDataset

WITH_NAME = """
from support.parts import number_of, numbers
from stoker import Cache
from stoker.jobs import Sharing
from stoker.pytorch import Loader, SampleDataset
cache = Cache("50%", sharing=Sharing("sleepy"))
dataset = SampleDataset(numbers(200), number_of)
with Loader(dataset, batch_size=10, recipe="lru", cache=cache) as loader:
    list(loader)
    print("trained", flush=True)
    input()
"""


def job(processes: int = 1, **counts: float) -> dict[str, Any]:
    waits = Waits()
    waits.add(0.0015)
    return {
        "name": "a",
        "pid": 7,
        "processes": processes,
        "counts": dict.fromkeys(PUBLISHED, 0.0) | counts,
        "waits": waits.counts,
    }


def cache(*jobs: dict[str, Any]) -> dict[str, Any]:
    return {"key": "k", "description": "Data", "jobs": list(jobs)}


@contextmanager
def training() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_NAME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="tests",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            assert process.stdout.readline() == "trained\n"
            yield process
        finally:
            process.kill()
            process.wait()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["top", *arguments], terminal_width=200)
    assert result.exit_code == 0, result.output
    return result.output


def test_figures_are_of_the_time_between_two_looks() -> None:
    first = job(accesses=100, hits=100, epoch_seconds=10.0)
    then = job(
        accesses=300, hits=150, fetched=150, read=150, bytes_from_source=4e6, epoch_seconds=14.0
    )
    view = view_of("Data", then, first)
    assert view.rate == 50
    assert view.hits == 0.25
    assert view.reads == 37.5
    assert view.read_bytes == 1e6
    assert (view.bound, view.wait_p99) == ("compute", 0.0)  # no wait since the first look


def test_ranks_of_a_job_count_as_one_whose_time_passes_once() -> None:
    view = view_of("Data", job(4, accesses=400, epoch_seconds=40.0, stall_seconds=20.0))
    assert view.rate == 40
    assert view.stall == 0.5


@pytest.mark.parametrize(
    ("counts", "bound"),
    [
        ({}, "start-up"),
        ({"accesses": 10, "epoch_seconds": 10.0, "stall_seconds": 0.1}, "compute"),
        (
            {"accesses": 10, "epoch_seconds": 10.0, "stall_seconds": 5.0, "source_seconds": 9.0}
            | {"workers": 1},
            "storage",
        ),
        ({"accesses": 10, "epoch_seconds": 10.0, "stall_seconds": 5.0, "workers": 1}, "decode"),
    ],
)
def test_what_bounds_a_job(counts: dict[str, float], bound: str) -> None:
    view = view_of("Data", job(**counts))
    assert view.bound == bound
    assert bool(view.verdict) == (bound != "start-up")


def test_a_job_that_does_nothing_for_seconds_is_idle() -> None:
    history, busy = History(), job(accesses=10, epoch_seconds=1.0)
    for now in (0.0, 3.0):
        [view] = history.add([cache(busy)], now)
        assert view.rate == 10, "since it began"
    [view] = history.add([cache(busy)], 6.0)
    assert (view.bound, view.rate) == ("idle", 0.0)
    later = job(accesses=30, epoch_seconds=2.0)
    [view] = history.add([cache(later)], 7.0)
    assert view.rate == 20


def test_keys_sort_choose_and_open() -> None:
    base = view_of("Data", job(accesses=10, epoch_seconds=1.0))
    views = [JobView(**{**vars(base), "name": n, "rate": r}) for n, r in (("a", 1.0), ("b", 2.0))]
    screen = Screen()
    assert [view.name for view in screen.ordered(views)] == ["b", "a"]
    for key in ("n", "j", "j", "\n", "?"):
        screen.press(key, len(views))
    assert [view.name for view in screen.ordered(views)] == ["a", "b"]
    assert (screen.at, screen.is_open, screen.is_over) == (1, True, False)
    screen.frame(views[:1])
    assert screen.at == 0, "the chosen job has gone"
    screen.press("q", 1)
    assert screen.is_over


def test_of_many_jobs_the_chosen_one_is_on_the_screen_with_its_verdict() -> None:
    base = view_of("Data", job(accesses=10, epoch_seconds=1.0))
    names = [f"job {number:02}" for number in range(64)]
    views = [JobView(**{**vars(base), "name": name}) for name in names]
    screen, console = Screen("name"), Console(width=80, height=24)
    for _ in range(40):
        screen.press("j", len(views))
    with console.capture() as captured:
        console.print(screen.frame(views, console.height))
    shown = captured.get()
    assert "job 40" in shown
    assert "job 00" not in shown
    assert "training waits" in shown
    assert len(shown.splitlines()) <= 24


def test_once_prints_a_real_job_and_its_numbers() -> None:
    assert "no running job shares a cache" in run("--once")
    assert json.loads(run("--once", "--json")) == []
    with Loader(SampleDataset(numbers(200), number_of), batch_size=10, recipe="lru") as loader:
        list(loader)
        [view] = json.loads(run("--once", "--json"))
        assert view["pid"] == os.getpid()
        assert view["rate"] > 0
        assert 0 < view["wait_p50"] <= view["wait_p99"] <= WAIT_SECONDS[-1]
        assert "lru" in run("--once")


@pytest.mark.parametrize("arguments", [["--json"], [], ["--once", "--sort", "size"]])
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(root, ["top", *arguments]).exit_code == 2


def test_in_a_terminal_it_opens_a_job_and_ends_with_q_and_leaves_the_terminal_as_it_was() -> None:
    with training():
        ours, its = pty.openpty()
        code = "from stoker.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "top"], stdin=its, stdout=its, stderr=its,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
        )  # fmt: skip
        os.close(its)
        try:
            seen = read_until(ours, "sleepy")
            assert "bound by" in seen
            os.write(ours, b"\n")
            read_until(ours, "wait for a batch")
            os.write(ours, b"q")
            read_until(ours, "\x1b[?1049l")  # back from the other screen
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def read_until(terminal: int, wanted: str) -> str:
    """Return what the terminal shows up to ``wanted``; fails after a minute without it."""
    seen, deadline = "", time.monotonic() + 60
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert ready, seen
        seen += os.read(terminal, 1 << 16).decode(errors="replace")
    return seen
