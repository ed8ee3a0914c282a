"""How a Python process of Stoker's own is started, so that it runs only our code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path

# sys alone is built in: nothing is looked for before the path is right.
_BOOT = (
    "import sys; n = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + n]; "
    "sys.argv[:] = sys.argv[2 + n :]; "
    "from importlib import import_module; import_module(sys.argv[0]).main()"
)
_STDLIB_ZIP = re.compile(r"python3\d+\.zip")


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

    Those mean the current folder, and come before the standard library.
    """
    given = base.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in given if entry.startswith(os.sep)]
    others = {name: value for name, value in base.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(kept)} if kept else others


def _path() -> list[str]:
    """Return ``sys.path`` for the process."""
    entries = [os.fspath(entry) for entry in sys.path]
    library = [entry for entry in entries if _is_standard(Path(entry))]
    others = [entry for entry in entries if entry.startswith(os.sep) and entry not in library]
    ours = str(Path(__file__).parents[1])
    if ours not in others:  # found by way of the current folder, or by an import hook
        others.insert(0, ours)
    with contextlib.suppress(FileNotFoundError):  # that folder may be gone
        others += [str(Path.cwd() / entry) for entry in entries if not entry.startswith(os.sep)]
    return list(dict.fromkeys([*library, *others]))


def _is_standard(entry: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return entry in (library, library / "lib-dynload") or bool(_STDLIB_ZIP.fullmatch(entry.name))
