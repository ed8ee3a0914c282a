"""The processes that work for a test, known by the runtime directory in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from support.waiting import await_true, until

_OURS = b"from multiprocessing."  # its tracker and its fork server, which live as long as we do


def working_for_us(part: str = "") -> list[int]:
    """Return the processes started by this test, those with ``part`` in their command line."""
    mark = f"STOKER_RUNTIME_DIR={os.environ['STOKER_RUNTIME_DIR']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes().split(b"\0")
                if part.encode() in command and mark in environment and _OURS not in command:
                    found.append(int(entry.name))
    return found


def prefetchers() -> list[int]:
    """Return the prefetch processes of this test."""
    return working_for_us("stoker.prefetch.process")


def wait_for_prefetcher(seconds: float = 60.0) -> int:
    """Return the prefetch process, once there is one."""
    until(prefetchers, seconds)
    return prefetchers()[0]


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def nothing_left(seconds: float = 60.0) -> Iterator[None]:
    """Fail when a process of the test outlives it, and end that process."""
    try:
        yield
    finally:
        await_true(lambda: not working_for_us(), seconds)
        left = working_for_us()
        signal_all(left, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"
