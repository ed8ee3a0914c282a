"""Runs one contestant in a process of its own, and counts the CPU seconds of all it started."""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import stoker

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 20.0  # seconds for processes that outlive the contestant, such as the prefetcher


class Running:
    """A contestant under way."""

    def __init__(self, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
        _compile()
        context = _context()
        self._answer, theirs = context.Pipe(False)
        self._process = context.Process(
            target=_run, args=(theirs, dict(os.environ), work, arguments)
        )
        self._process.start()
        theirs.close()

    def result(self) -> dict[str, Any]:
        """Wait for it and return what it returned; RuntimeError with its traceback if it failed."""
        try:
            kind, value = self._answer.recv()
        except EOFError:
            kind, value = "error", "it died"
        self._process.join()
        if kind == "error":
            raise RuntimeError(f"a contestant failed: {value}")
        result: dict[str, Any] = value
        return result


WARM = "STOKER_BENCH_WARM"
"""Environment variable of short runs: contestants begin where torch is imported."""


@cache
def _context() -> Any:
    if WARM not in os.environ:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", "stoker.pytorch"])
    return context


@cache
def _compile() -> None:
    """Compile our modules, as installing them does, or each process would do so as it starts."""
    compileall.compile_dir(Path(stoker.__file__).parent, quiet=2)


def run_alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return ``work(*arguments)`` from a new process, with ``cpu_s`` added.

    ``work`` is importable. ``cpu_s`` is user and system time of the process from the call on, and
    of everything it started, daemons included; imports at the top of ``work``'s module are not.
    """
    return Running(work, arguments).result()


def _run(
    answer: Any,
    environment: dict[str, str],
    work: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
) -> None:
    # The harness gives each process that imports it a cache of its own; here they share one.
    os.environ.update(environment)
    # A process that leaves its parent becomes our child, so that we can count it too.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Spawned itself, it would spawn its workers too, where a script of its own would fork them.
    multiprocessing.set_start_method("fork", force=True)
    try:
        before = cpu_seconds()
        result = work(*arguments)
        _wait_for_children()
        answer.send(("result", result | {"cpu_s": cpu_seconds() - before}))
    except BaseException:
        answer.send(("error", traceback.format_exc()))
        raise


def _wait_for_children() -> None:
    deadline = time.monotonic() + _PATIENCE
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def tree_cpu_seconds() -> float:
    """Return user and system time so far of this process and of all it started.

    What others use is counted in ticks of 10 ms. Only for a process of :func:`run_alone`, which
    adopts what leaves its parent.
    """
    children: dict[int, list[tuple[int, float]]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            ticks = sum(map(int, fields[11:15]))  # utime, stime, and those of reaped children
            children.setdefault(int(fields[1]), []).append((int(entry.name), ticks / _TICKS))
    total, left = cpu_seconds(), [os.getpid()]
    while left:
        for pid, seconds in children.get(left.pop(), []):
            total += seconds
            left.append(pid)
    return total


def cpu_seconds() -> float:
    """Return user and system time so far of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
