"""Locks that belong to an open file description.

Unlike process-wide record locks, they tell two openings in one process apart, are not lost when
some other descriptor of the same file is closed, and involve no process ids, which differ between
namespaces. Forked children share the description, and so the lock, until they close it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from stoker.node import descriptors
from stoker.node.descriptors import Descriptor
from stoker.node.owned import open_file

_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def try_lock(fd: int, *, shared: bool = False, start: int = 0, length: int = 0) -> bool:
    """Lock bytes of the file without waiting, and return whether that succeeded.

    ``length`` 0 means up to the end. Raises :class:`OSError` for a bad descriptor.
    """
    try:
        _set(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length)
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES: another process holds it
        return False
    return True


def await_lock(
    fd: int, patience: float, *, every: float = 0.02, start: int = 0, length: int = 0
) -> bool:
    """Lock bytes as :func:`try_lock` does, but wait for up to ``patience`` seconds.

    Looks ``every`` so many seconds; what blocks on a lock could not be given up.
    """
    deadline = time.monotonic() + patience
    while not try_lock(fd, start=start, length=length):
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def try_lock_file(path: Path) -> Descriptor | None:
    """Return the descriptor, kept from forks, that holds the lock on the file at ``path``.

    The file is ours, made if need be. None if another process holds the lock. Raises as
    :func:`~stoker.node.owned.open_file` does.
    """
    with descriptors.no_fork:
        lock = descriptors.keep(Descriptor(open_file(path, os.O_RDWR | os.O_CREAT)))
    if try_lock(lock.fileno()):
        return lock
    descriptors.drop(lock)
    return None


def is_locked(fd: int, *, start: int = 0, length: int = 0) -> bool:
    """Return whether another description holds a lock on these bytes; takes none.

    ``length`` 0 means up to the end. Raises :class:`OSError` for a bad descriptor.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    told = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(struct.unpack(_FLOCK, told)[0] != fcntl.F_UNLCK)


def unlock(fd: int, *, start: int = 0, length: int = 0) -> None:
    """Give back the locks that this description holds on these bytes, by default on all."""
    _set(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, length)


def _set(fd: int, command: int, kind: int, start: int, length: int) -> None:
    fcntl.fcntl(fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
