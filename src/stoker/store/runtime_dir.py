"""The user's own directory for what Stoker's processes must find: sockets and lock files."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from stoker.errors import ConfigError

MARKER = ".stoker"
"""File that marks the directory as Stoker's; nothing is ever removed from one without it."""


def runtime_dir() -> Path:
    """Return where the directory is, whether or not it exists.

    ``$STOKER_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/stoker`` where that is ours, else
    ``stoker-UID`` in the directory for temporary files (``$TMPDIR`` or ``/tmp``). With a node
    that was chosen, a directory of its own beside that. Raises what :func:`chosen_node` does.
    """
    path = _machines_dir()
    return path.with_name(f"{path.name}-{node}") if (node := chosen_node()) else path


def chosen_node() -> str:
    """Return ``$STOKER_NODE``, which parts the processes of one machine as nodes are; else "".

    Raises :class:`~stoker.errors.ConfigError` for one that cannot be part of a file name.
    """
    node = os.environ.get("STOKER_NODE", "")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{0,32}", node):
        raise ConfigError(
            f"STOKER_NODE={node!r} is refused: give at most 32 letters, digits, '.', '_' or '-'"
        )
    return node


def _machines_dir() -> Path:
    if chosen := os.environ.get("STOKER_RUNTIME_DIR"):
        return Path(chosen)
    # After su or sudo the variable may still name another user's directory.
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if session.is_dir() and session.stat().st_uid == os.geteuid():
        return session / "stoker"
    return Path(tempfile.gettempdir()) / f"stoker-{os.geteuid()}"


def prepare_runtime_dir() -> Path:
    """Return the directory, made and marked if need be, and safe: ours alone.

    Raises :class:`OSError` if it cannot be made, is a symbolic link or not a directory, belongs
    to someone else, or others may enter it.
    """
    path = runtime_dir()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path)
    if not (path / MARKER).exists():
        (path / MARKER).write_text("Stoker's sockets and locks; `stoker clean` empties it.\n")
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
        raise NotADirectoryError(f"{path} is a link or not a directory: set STOKER_RUNTIME_DIR")
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {info.st_uid}: set STOKER_RUNTIME_DIR")
    if info.st_mode & 0o077:
        raise PermissionError(f"{path} is open to others: run chmod 700 on it")
