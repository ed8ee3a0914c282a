"""The files by which the processes that share one memory find each other and agree."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from stoker.node import descriptors
from stoker.node.descriptors import Descriptor
from stoker.node.locks import try_lock, unlock
from stoker.node.owned import open_file

_NAME = re.compile(r"([0-9a-f]{24})\.(sock|serve|holders)")


class RendezvousFiles:
    """Three files in the runtime directory, for one key.

    ``NAME.sock``
        where the memory is passed on.
    ``NAME.serve``
        locked by the one process that answers there. Only the holder of this lock may bind the
        socket, make new memory, or remove files.
    ``NAME.holders``
        a shared lock for each process that has the memory, so that it is made again, and files
        are removed, only when no process has it. It contains the memory's token.

    Locks belong to open file descriptions: they end with their process, and need no ids of
    processes. All methods raise :class:`OSError` where the file system does.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.socket = folder / f"{name}.sock"
        self._serve = folder / f"{name}.serve"
        self._holders = folder / f"{name}.holders"

    @classmethod
    def of(cls, folder: Path, key: str) -> RendezvousFiles:
        """Return the files of ``key``, any text."""
        return cls(folder, hashlib.sha256(key.encode()).hexdigest()[:24])

    @classmethod
    def all(cls, folder: Path) -> list[RendezvousFiles]:
        """Return all of which a file exists; other files are left alone."""
        matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
        return [cls(folder, name) for name in sorted({match[1] for match in matches if match})]

    def try_serve(self) -> Descriptor | None:
        """Become the process that answers; None if another is, or the file was just removed."""
        serve = _open(self._serve)
        if try_lock(serve.fileno()) and _is_at(serve, self._serve):
            return serve
        descriptors.drop(serve)
        return None

    def try_alone(self, token: str) -> Descriptor | None:
        """Become the only holder, of new memory; None if the last one still has holders.

        The caller serves.
        """
        holders = _open(self._holders)
        try:
            if not try_lock(holders.fileno()):
                descriptors.drop(holders)
                return None
            os.ftruncate(holders.fileno(), 0)
            os.pwrite(holders.fileno(), token.encode(), 0)
            # From exclusive to shared in one step: no process gets in between.
            try_lock(holders.fileno(), shared=True)
        except BaseException:
            descriptors.drop(holders)
            raise
        return holders

    def join(self, token: str) -> tuple[Descriptor, Descriptor]:
        """Become one more holder; return the descriptors (serve, holders).

        Raises :class:`ConnectionError` if the memory of that token is gone by now.
        """
        holders = _open(self._holders, create=False)
        try:
            locked = try_lock(holders.fileno(), shared=True) and _is_at(holders, self._holders)
            # With the shared lock held, file and token cannot change any more.
            if not locked or token != _content(holders):
                raise ConnectionError("the memory went away while attaching to it")
            return _open(self._serve, create=False), holders
        except BaseException:
            descriptors.drop(holders)
            raise

    def leave(self, serve: Descriptor, holders: Descriptor) -> bool:
        """Stop holding and serving; the last holder removes the files, and gets True."""
        try:
            unlock(holders.fileno())
            return self._remove(serve, holders)
        finally:
            descriptors.drop(holders)
            descriptors.drop(serve)

    def clean(self) -> bool:
        """Remove the files if no process has the memory, and return whether that was so."""
        serve = self.try_serve()
        return serve is not None and self.leave(serve, _open(self._holders))

    def _remove(self, serve: Descriptor, holders: Descriptor) -> bool:
        # A process that fails to get a lock here may leave, because its holder comes by this
        # code too, or makes new memory.
        while try_lock(serve.fileno()):
            if try_lock(holders.fileno()):
                if not (_is_at(serve, self._serve) and _is_at(holders, self._holders)):
                    return False
                for path in (self.socket, self._holders, self._serve):
                    path.unlink(missing_ok=True)
                return True
            unlock(serve.fileno())
            # A holder that left just now found the serve lock taken: then it is up to us still.
            if not try_lock(holders.fileno()):
                return False
            unlock(holders.fileno())
        return False


def _open(path: Path, *, create: bool = True) -> Descriptor:
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    with descriptors.no_fork:
        return descriptors.keep(Descriptor(open_file(path, flags)))


def _is_at(descriptor: Descriptor, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _content(descriptor: Descriptor) -> str:
    return os.pread(descriptor.fileno(), 64, 0).decode("ascii", "replace")
