"""How a Python process of Stoker's own is started, so that it runs only our code."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import context, spawn
from pathlib import Path
from types import FunctionType
from typing import IO, Any, NamedTuple

from stoker.node import descriptors
from stoker.node.descriptors import Descriptor

# gc and sys are built in: nothing is looked for before the path is right. What modules are made of
# stays, so that to look for garbage among it would be a tenth of the start.
_BOOT = (
    "import gc, sys; n = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + n]; "
    "sys.argv[:] = sys.argv[2 + n :]; gc.disable(); "
    "from importlib import import_module; module = import_module(sys.argv[0]); "
    "gc.freeze(); gc.enable(); module.main()"
)
# A folder or a Python of others' may lie where nothing answers. Then this process waits there: one
# that has not run a program yet would have a copy of all our descriptors meanwhile, also of locks.
_ENTER = """
import os, resource, sys
def least(*limits): return min(limits, key=lambda each: each % (1 << 64))  # -1: none
try:
    for each in sys.argv[2].split():
        number, soft, hard = map(int, each.split(":"))
        hard = least(hard, resource.getrlimit(number)[1])
        resource.setrlimit(number, (least(soft, hard), hard))
    os.chdir(sys.argv[1])
    os.execv(sys.argv[3], sys.argv[3:])
except (OSError, ValueError) as error:
    sys.exit(f"a process of a job cannot be started: {error}")
"""
_MAIN = ("__main__", "__mp_main__")
"""What a script is called: by itself, and in a process that multiprocessing spawned."""
LIMITS = {name: number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
"""What the kernel limits for each process, by name."""
_STDLIB_ZIP = re.compile(r"python3\d+\.zip")


class Surroundings(NamedTuple):
    """What a process of ours finds around it: enough for another process to start it in our place.

    Its environment is to be what :func:`environment` returns.
    """

    python: str
    path: Sequence[str]
    environment: Mapping[str, str]
    folder: str | None = None
    """The current folder; None: that of the process which starts it."""
    umask: int = -1
    """Permissions that its files lack; -1: those which files of who starts it lack."""
    limits: Mapping[str, Sequence[int]] = {}
    """Its soft and hard limits by :data:`LIMITS`, where it has a folder; -1 is none.

    It has no more than who starts it may have, and what that has where nothing is given.
    """

    @classmethod
    def own(cls, base: Mapping[str, str] = os.environ) -> Surroundings:
        """Return those of this process for one it starts, with the environment ``base``."""
        return cls(_python(), _path(), environment(base))

    @classmethod
    def told(cls, base: Mapping[str, str] = os.environ) -> Surroundings:
        """Return those of this process for one that another starts; raises :class:`OSError`."""
        status = Path("/proc/self/status").read_text()  # os.umask() would set it
        umask = int(status.partition("\nUmask:")[2].split()[0], 8)
        limits = {name: resource.getrlimit(number) for name, number in LIMITS.items()}
        return cls.own(base)._replace(folder=str(Path.cwd()), umask=umask, limits=limits)


def start(
    module: str,
    *arguments: object,
    fds: Sequence[int] = (),
    surroundings: Surroundings | None = None,
    output: IO[bytes] | None = None,
    detached: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main()`` of ``module``: see :func:`command`.

    It has the descriptors ``fds`` under the same numbers, nothing to read at its standard input,
    our own surroundings unless others are given, and writes to ``output`` if given. ``detached``:
    a session of its own, without our terminal. Raises :class:`OSError`, and :class:`ValueError`
    for surroundings that no process can have; where a folder is given, it ends instead if it cannot
    enter that or run its Python, and what it waits for there is nothing to us.
    """
    around = surroundings or Surroundings.own()
    words = command(around, module, *arguments)
    if around.folder is not None:
        limits = " ".join(
            ":".join(map(str, (LIMITS[name], *limit))) for name, limit in around.limits.items()
        )
        words = [_python(), "-I", "-S", "-c", _ENTER, around.folder, limits, *words]
    return subprocess.Popen(
        words,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=around.environment,
        umask=around.umask,
        start_new_session=detached,
    )


def command(around: Surroundings, module: str, *arguments: object) -> list[str]:
    """Return the command line of a process that calls ``main()`` of ``module``.

    The process imports the standard library first, so that no ``logging.py`` in a folder of data
    replaces it; then from the path of the process for which it is started, in the same order: the
    user's classes that are unpickled there come from the same place as in that one. The current
    folder is in that list only if that process imports from it, and then it is the last entry.
    ``sys.argv[1:]`` are the ``arguments``, as text.
    """
    path = around.path
    return [around.python, "-P", "-c", _BOOT, str(len(path)), *path, module, *map(str, arguments)]


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``base`` for such a process: no relative entry of PYTHONPATH, nor an empty one.

    Those mean the current folder, and come before the standard library. Unless ``base`` says how
    many, OpenBLAS has one thread: as NumPy is imported others spin for longer than that takes, on
    each core, and no process of ours multiplies matrices.
    """
    given = base.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in given if entry.startswith(os.sep)]
    others = {name: value for name, value in base.items() if name != "PYTHONPATH"}
    others = {"OPENBLAS_NUM_THREADS": "1", **others}
    return {**others, "PYTHONPATH": os.pathsep.join(kept)} if kept else others


# --- what it is given ---


_given: list[int] = []
"""The descriptors that came with the job which this process loads."""


class _Passed:
    """A descriptor of the job, by its place: its number is another one in each process."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return _given[self._place]


class _Passing:
    """Stands in for the process being spawned while multiprocessing pickles descriptors."""

    DupFd = _Passed

    def __init__(self) -> None:
        self.copies: list[Descriptor] = []

    def duplicate_for_child(self, fd: int) -> int:
        # A copy, since the child takes over each of them on its own.
        with descriptors.no_fork:
            self.copies.append(descriptors.keep(Descriptor(os.dup(fd))))
        return len(self.copies) - 1


class _Pickler(pickle.Pickler):
    """Refuses what is found by name in ``__main__``, a script or a notebook, however deep."""

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, type | FunctionType) and part.__module__ in _MAIN:
            raise pickle.PicklingError(f"{part.__qualname__} is defined in __main__")
        return NotImplemented


@contextlib.contextmanager
def memory_file(content: bytes | memoryview) -> Iterator[int]:
    """Give the descriptor of a file without a name that holds ``content``, to be read from 0."""
    with descriptors.no_fork:
        file = descriptors.keep(Descriptor(os.memfd_create("stoker-job", os.MFD_CLOEXEC)))
    try:
        _write(file.fileno(), content)
        del content  # it may be large, and the file is there for a while
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()
    finally:
        descriptors.drop(file)


def _write(file: int, content: bytes | memoryview) -> None:
    with memoryview(content) as left:
        done = 0
        while done < len(left):  # at most 2 GiB are written at once
            done += os.write(file, left[done:])


@contextlib.contextmanager
def dumped(job: object) -> Iterator[list[int]]:
    """Give the descriptors from which a child can :func:`load` the job, while they are passed on.

    Raises what pickling raises for a source that cannot be passed on, also for one made of
    classes or functions of ``__main__``, which the child has not.
    """
    passing = _Passing()
    try:
        with memory_file(_pickled(job, passing)) as file:
            yield [file, *(copy.fileno() for copy in passing.copies)]
    finally:
        for copy in passing.copies:
            descriptors.drop(copy)


def _pickled(job: object, passing: _Passing) -> memoryview:
    before: Any = context.get_spawning_popen()
    context.set_spawning_popen(passing)  # type: ignore[arg-type]
    try:
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=5).dump(job)
        return pickled.getbuffer()
    finally:
        context.set_spawning_popen(before)


def load(fds: Sequence[int]) -> Any:
    """Return the job for which :func:`dumped` gave these descriptors, which become the job's."""
    _given[:] = fds[1:]
    with os.fdopen(fds[0], "rb") as file:
        return pickle.load(file)


# --- where it finds modules ---


def _python() -> str:
    found = spawn.get_executable()
    return os.fsdecode(found) if found is not None else sys.executable


def _path() -> list[str]:
    """Return ``sys.path`` for the process."""
    entries = [os.fspath(entry) for entry in sys.path]
    library = [entry for entry in entries if _is_standard(Path(entry))]
    others = [entry for entry in entries if entry.startswith(os.sep) and entry not in library]
    ours = str(Path(__file__).parents[__name__.count(".")])  # where the package lies
    if ours not in others:  # found by way of the current folder, or by an import hook
        others.insert(0, ours)
    with contextlib.suppress(FileNotFoundError):  # that folder may be gone
        others += [str(Path.cwd() / entry) for entry in entries if not entry.startswith(os.sep)]
    return list(dict.fromkeys([*library, *others]))


def _is_standard(entry: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return entry in (library, library / "lib-dynload") or bool(_STDLIB_ZIP.fullmatch(entry.name))
