"""How a Python process of Stoker's own is started, so that it runs only our code."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from multiprocessing import context, spawn
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from stoker.node.descriptors import Descriptor

# sys alone is built in: nothing is looked for before the path is right.
_BOOT = (
    "import sys; n = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + n]; "
    "sys.argv[:] = sys.argv[2 + n :]; "
    "from importlib import import_module; import_module(sys.argv[0]).main()"
)
_MAIN = ("__main__", "__mp_main__")
"""What a script is called: by itself, and in a process that multiprocessing spawned."""
_STDLIB_ZIP = re.compile(r"python3\d+\.zip")


def start(
    module: str,
    *arguments: object,
    fds: Sequence[int] = (),
    base: Mapping[str, str] = os.environ,
    output: IO[bytes] | None = None,
    detached: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main()`` of ``module``: see :func:`command`.

    It has the descriptors ``fds`` under the same numbers, nothing to read at its standard input,
    the environment ``base`` as :func:`environment` returns it, and writes to ``output`` if given.
    ``detached``: a session of its own, without our terminal. Raises :class:`OSError`.
    """
    return subprocess.Popen(
        command(module, *arguments),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(base),
        start_new_session=detached,
    )


def command(module: str, *arguments: object) -> list[str]:
    """Return the command line of a process that calls ``main()`` of ``module``.

    The process imports the standard library first, so that no ``logging.py`` in a folder of data
    replaces it; then from the path of this process, in the same order: the user's classes that are
    unpickled there come from the same place as here. The current folder is in that list
    only if this process imports from it, and then it is the last entry. ``sys.argv[1:]`` are the
    ``arguments``, as text.
    """
    found = spawn.get_executable()
    python = os.fsdecode(found) if found is not None else sys.executable
    path = _path()
    return [python, "-P", "-c", _BOOT, str(len(path)), *path, module, *map(str, arguments)]


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


class _Passed:
    """A descriptor that the child inherits under its number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


class _Passing:
    """Stands in for the process being spawned while multiprocessing pickles descriptors."""

    DupFd = _Passed

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        # A copy, since the child takes over each of them on its own.
        self.fds.append(os.dup(fd))
        return self.fds[-1]


class _Pickler(pickle.Pickler):
    """Refuses what is found by name in ``__main__``, a script or a notebook, however deep."""

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, type | FunctionType) and part.__module__ in _MAIN:
            raise pickle.PicklingError(f"{part.__qualname__} is defined in __main__")
        return NotImplemented


def memory_file(content: bytes) -> Descriptor:
    """Return a file without a name that holds ``content``, to be read from the beginning."""
    file = Descriptor(os.memfd_create("stoker-job", os.MFD_CLOEXEC))
    try:
        os.write(file.fileno(), content)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
    except BaseException:
        file.close()
        raise
    return file


def dump(job: object) -> tuple[bytes, list[int]]:
    """Return the pickled job and the descriptors that the child must inherit; close them after.

    Raises what pickling raises for a source that cannot be passed on, also for one made of
    classes or functions of ``__main__``, which the child has not.
    """
    passing = _Passing()
    before: Any = context.get_spawning_popen()
    context.set_spawning_popen(passing)  # type: ignore[arg-type]
    try:
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=5).dump(job)
        return pickled.getvalue(), passing.fds
    except BaseException:
        for fd in passing.fds:
            os.close(fd)
        raise
    finally:
        context.set_spawning_popen(before)


# --- where it finds modules ---


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
