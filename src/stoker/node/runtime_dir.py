"""The user's own directory for what Stoker's processes must find: sockets and lock files."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from stoker.errors import ConfigError, UntrustedPath
from stoker.node import owned

MARKER = ".stoker"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""


_WAY_OUT = "set STOKER_RUNTIME_DIR to a directory that is yours alone"
_MOST_TAKEN = 16  # names that others may have taken before us in the directory for temporary files


def runtime_dir() -> Path:
    """Return where the directory is, whether or not it exists.

    ``$STOKER_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/stoker`` where that is ours, else
    ``stoker-UID`` in the directory for temporary files (``$TMPDIR`` or ``/tmp``). A chosen node
    has its own directory beside that. Where another user has taken the name in
    the directory for temporary files it is ``stoker-UID+1``, and so on: all processes of a user
    settle on one. Raises what :func:`chosen_node` does.
    """
    path, is_shared = _machines_dir()
    if node := chosen_node():
        path = path.with_name(f"{path.name}-{node}")
    return _first_of_ours(path) if is_shared else path


def _first_of_ours(path: Path) -> Path:
    """Return what is ours of ``path`` and its other names, else the first that is free."""
    free = None
    for number in range(_MOST_TAKEN):
        name = path.with_name(f"{path.name}+{number}") if number else path
        try:
            # One of ours goes before a free one: the name was taken when our others chose it.
            if name.lstat().st_uid == os.geteuid():
                return name
        except FileNotFoundError:
            free = free or name
    return free or path


def chosen_node() -> str:
    """Return ``$STOKER_NODE``, which separates processes of one machine like nodes; else "".

    Raises :class:`~stoker.errors.ConfigError` for one that cannot be part of a file name.
    """
    node = os.environ.get("STOKER_NODE", "")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{0,32}", node):
        raise ConfigError(
            f"STOKER_NODE={node!r} is invalid: give at most 32 letters, digits, '.', '_' or '-'"
        )
    return node


def _machines_dir() -> tuple[Path, bool]:
    """Return where it is for the whole machine, and whether others may put things there."""
    if chosen := os.environ.get("STOKER_RUNTIME_DIR"):
        return Path(chosen), False
    # After su or sudo the variable may still name another user's directory.
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if session.is_dir() and session.stat().st_uid == os.geteuid():
        return session / "stoker", False
    return Path(tempfile.gettempdir()) / f"stoker-{os.geteuid()}", True


def prepare_runtime_dir() -> Path:
    """Return the directory, made and marked if necessary, and safe: ours alone.

    Raises :class:`OSError` if it cannot be made, and :class:`~stoker.errors.UntrustedPath` if it
    is a symbolic link or not a directory, belongs to someone else, or others may enter it.
    """
    path = runtime_dir()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _check(path)
    except UntrustedPath:
        if runtime_dir() == path:
            raise
        return prepare_runtime_dir()  # the name was taken between the look and the making
    if not (path / MARKER).exists():
        with os.fdopen(owned.open_file(path / MARKER, os.O_WRONLY | os.O_CREAT), "w") as file:
            file.write("Stoker's sockets and locks; `stoker clean` empties it.\n")
    return path


def existing_runtime_dir() -> Path | None:
    """Return the directory if it exists, is marked as Stoker's and safe; else None."""
    path = runtime_dir()
    try:
        _check(path)
        return path if (path / MARKER).is_file() else None
    except OSError:
        return None


def _check(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise UntrustedPath(f"{path} is a link or not a directory: {_WAY_OUT}")
    if info.st_uid != os.geteuid():
        raise UntrustedPath(f"{path} belongs to user {info.st_uid}: {_WAY_OUT}")
    if info.st_mode & 0o077:
        raise UntrustedPath(
            f"{path} is open to others (mode {info.st_mode & 0o7777:04o}): run `chmod 700 {path}`"
        )
