"""Containers for tests: namespaces of their own by unshare, and control groups for memory."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.node import memory

KINDS = ("mnt", "pid", "user", "net", "ipc", "uts")
_OUTER = [
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--mount-proc", "--kill-child", "sh", "-ec"),
]


def command(
    *program: object, user: int = 1000, mounts: dict[Path, Path] | None = None
) -> list[str]:
    """Return the command line of a program in a container.

    It is ``user`` there, and as seen from outside who calls this. ``mounts`` maps folders of
    the container to those that are mounted there, as a host path is.
    """
    binds = [
        f"mount --bind {shlex.quote(str(of))} {shlex.quote(str(at))}"
        for at, of in (mounts or {}).items()
    ]
    inner = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}", *map(str, program)]
    return [*_OUTER, "; ".join([*binds, f"exec {shlex.join(inner)}"])]


@functools.cache
def why_not() -> str:
    """Return why this machine permits no namespaces; "" if it does."""
    if shutil.which("unshare") is None:
        return "unshare is not on PATH"
    done = subprocess.run(command("true"), capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else f"unshare fails here: {done.stderr.strip()}"


def need_containers() -> None:
    """Skip the test where namespaces are not permitted."""
    if why := why_not():
        pytest.skip(why)


def start(
    program: str, *arguments: object, user: int, runtime: Path, folder: Path
) -> subprocess.Popen[str]:
    """Start Python's ``program`` in a container that has the runtime directory ``runtime``.

    That is mounted in ``folder``, where nothing else of the container's is. Lines are exchanged by
    its standard input and output.
    """
    inside = folder / f"run-of-{user}"
    inside.mkdir()
    python = command(
        *(sys.executable, "-W", "error", "-c", program, *arguments),
        user=user,
        mounts={inside: runtime},
    )
    return subprocess.Popen(
        python,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STOKER_RUNTIME_DIR": str(inside)},
    )


class MemoryGroup:
    """A control group of its own below this process's, of either version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v1 = (folder / "memory.usage_in_bytes").exists()

    @property
    def used(self) -> int:
        """Bytes charged to it."""
        name = "memory.usage_in_bytes" if self._is_v1 else "memory.current"
        return int((self.folder / name).read_text())

    def limit(self, num_bytes: int) -> None:
        """Let it have no more than that."""
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.folder / name).write_text(str(num_bytes))

    def command(self, *program: object) -> list[str]:
        """Return the command line of a program that runs in it."""
        enter = f"echo $$ > {shlex.quote(str(self.folder / 'cgroup.procs'))}"
        return ["sh", "-ec", f'{enter}; exec "$@"', "sh", *map(str, program)]


@contextlib.contextmanager
def memory_groups(count: int) -> Iterator[list[MemoryGroup]]:
    """Give some groups; skips the test where none can be made. They must be empty at the end."""
    made: list[MemoryGroup] = []
    try:
        made.extend(_new_group() for _ in range(count))
        yield made
    finally:
        for group in made:
            group.folder.rmdir()


def _new_group() -> MemoryGroup:
    why = "no memory controller is mounted"
    for _, _, parent in memory.memory_groups():
        folder = parent / f"stoker-test-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError as error:
            why = str(error)
            continue
        if any((folder / name).exists() for name in ("memory.current", "memory.usage_in_bytes")):
            return MemoryGroup(folder)
        folder.rmdir()
        why = f"{parent} gives its groups no memory controller"
    pytest.skip(f"no control group for memory: {why}")
