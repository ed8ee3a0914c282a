"""The files by which the runs that read one source find their daemon, and programs its table."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from stoker.errors import ConfigError
from stoker.owned import open_file, remove_socket
from stoker.runtime_dir import existing_runtime_dir, prepare_runtime_dir
from stoker.store.ofd import try_lock

_PREFIX = "tiering-"
_LONGEST_SOCKET = 107  # bytes in sockaddr_un, less the closing zero


class RunFolder:
    """A directory in the user's runtime directory, one for each source.

    ``lock`` is held by the daemon as long as it lives; whoever has it may remove and make the
    other files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "lock"
        self.table = path / "table"
        self.counters = path / "counters"
        self.requests = path / "socket"
        self.members = path / "members"
        self.log = path / "log"

    @classmethod
    def of(cls, source: Path) -> RunFolder:
        """Return the folder of a source, made if need be.

        Raises :class:`OSError` as the runtime directory does, and
        :class:`~stoker.errors.ConfigError` if its path is too long for sockets.
        """
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
        folder = cls(prepare_runtime_dir() / f"{_PREFIX}{name}")
        if len(os.fsencode(folder.members)) > _LONGEST_SOCKET:
            raise ConfigError(
                f"{folder.path} is too long for sockets: set STOKER_RUNTIME_DIR to a shorter path"
            )
        folder.path.mkdir(mode=0o700, exist_ok=True)
        return folder

    def clear(self) -> None:
        """Remove what a daemon leaves to programs; those that have it mapped keep it."""
        for path in (self.table, self.counters):
            path.unlink(missing_ok=True)
        remove_socket(self.requests)

    def clean(self) -> bool:
        """Remove what a dead daemon left; False if one lives, or there is nothing."""
        left = [path for path in (self.table, self.members) if path.exists()]
        if not left or not self.lock.exists():
            return False
        lock = open_file(self.lock, os.O_RDWR)
        try:
            if not try_lock(lock):
                return False
            self.clear()
            remove_socket(self.members)
            return True
        finally:
            os.close(lock)


def clean() -> int:
    """Remove what dead daemons left in the runtime directory; return of how many."""
    folder = existing_runtime_dir()
    found = sorted(folder.glob(f"{_PREFIX}*")) if folder else []
    return sum(RunFolder(path).clean() for path in found)
