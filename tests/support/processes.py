"""Processes that tests start, and those that Stoker starts at the side of training."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from stoker.node import child


class _Process(ForkServerProcess):
    """Has the environment of the process that starts it; the server's is of an earlier test."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        gc.freeze()  # of torch there are 300,000 objects, which each collection would go through
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Warm(ForkServerContext):
    Process = _Process


warm = _Warm()
"""Starts processes that share nothing with this one, as "spawn" does, but have imported already
what takes longer than most tests: see ``set_forkserver_preload`` in conftest.py."""


def processes_of(module: str, runtime: Path) -> list[int]:
    """The processes that run ``module`` and use a runtime directory below ``runtime``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # By whole arguments: a pgrep for the same name, of another rank's, is none of them.
            is_one = module.encode() in (process / "cmdline").read_bytes().split(b"\0")
            if is_one and str(runtime).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def stop(pid: int) -> None:
    """Stop a process, and return when it does nothing more: some of it may run for a moment."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path("/proc", str(pid), "task")
    while any(_state(task) not in ("T", "Z", "X") for task in tasks.iterdir()):
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def run_python(
    *words: object, folder: Path, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in ``folder``, begun where torch is imported: see :data:`warm`.

    Words are ``-W OPTION`` if any, then a script, ``-m`` and a module, or ``-c`` and code, and its
    arguments. For programs whose environment is nothing to Python itself.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as said:
        printed = [Path(said, name) for name in ("stdout", "stderr")]
        for file in printed:
            file.touch()
        whole = dict(os.environ if env is None else env)
        process = warm.Process(target=_as_python, args=(command, folder, whole, printed, _path()))
        process.start()
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            process.kill()
            process.join()
        status = process.exitcode or 0
        return subprocess.CompletedProcess(command, status, *(file.read_text() for file in printed))


@functools.cache
def _path() -> list[str]:
    """Where Python finds modules by itself; pytest adds folders of tests."""
    command = [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep='\\n')"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _as_python(
    words: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    printed: Sequence[Path],
    path: Sequence[str],
) -> None:
    for number, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    # Python's own, not ours; from 3.14 on what docs/troubleshooting.md has such programs set.
    multiprocessing.set_start_method("fork" if sys.version_info >= (3, 14) else None, force=True)
    warnings.resetwarnings()
    while words[0] == "-W":
        warnings._setoption(words[1])
        words = words[2:]
    is_module, is_code = words[0] == "-m", words[0] == "-c"
    sys.argv[:] = ["-c", *words[2:]] if is_code else words[is_module:]
    given = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    first = folder if is_module or is_code else Path(words[0]).parent
    sys.path[:] = [str(first), *given, *path]
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif is_code:
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out


_AT_IMPORT = os.getpid()


class _Descriptor:
    """A descriptor of this process, on its way to one that is begun."""

    def __init__(self, fd: int) -> None:
        self._fd: Any = fd

    def __getstate__(self) -> dict[str, Any]:
        return {"_fd": reduction.DupFd(self._fd)}

    def take(self) -> int:
        return int(self._fd.detach())


class _Begun:
    """A process begun where torch is imported, as far as a ``Popen`` is used for helpers."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


def start_warm(module: str, fd: int, *, fds: Sequence[int]) -> _Begun | subprocess.Popen[bytes]:
    """Start ``main()`` of ``module`` with a descriptor, begun where torch is imported.

    As :func:`stoker.node.child.start` would, which has to import first; it does so in forked
    children, for the server is their parent's.
    """
    assert list(fds) == [fd]
    if os.getpid() != _AT_IMPORT:
        return child.start(module, fd, fds=fds)
    process = warm.Process(target=_as_child, args=(module, _Descriptor(fd)), daemon=True)
    process.start()
    return _Begun(process)


def _as_child(module: str, descriptor: _Descriptor) -> None:
    sys.argv[:] = [module, str(descriptor.take())]
    importlib.import_module(module).main()
