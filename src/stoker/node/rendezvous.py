"""How unrelated processes come by the same shared memory: one makes it, the others join.

A client of the socket of a rendezvous gets one line of JSON with the memory's descriptors
attached, and the connection is closed. The one who answers reads nothing, so no client can make
it wait or feed it anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from stoker.errors import SegmentError, StokerError
from stoker.node import descriptors, messages
from stoker.node.descriptors import Descriptor, Handle
from stoker.node.locks import is_locked, try_lock, unlock
from stoker.node.owned import open_file
from stoker.node.runtime_dir import prepare_runtime_dir

_NAME = re.compile(r"([0-9a-f]{24})\.(sock|serve|holders)")
_VERSION = 2
_PATIENCE = 10.0  # seconds for a holder to take over, and to answer all who come at once
_RESERVING = 0.5e9  # bytes per second, at least, at which another process reserves memory
_TAKEOVER = 0.2  # seconds between two looks whether the one who answers is gone


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
        self._folder, self.name = folder, name

    @classmethod
    def of(cls, folder: Path, key: str) -> RendezvousFiles:
        """Return the files of ``key``, any text, for this version's messages.

        Versions that could not talk to each other so never meet: each has its own.
        """
        return cls(folder, hashlib.sha256(f"{_VERSION} {key}".encode()).hexdigest()[:24])

    @classmethod
    def all(cls, folder: Path) -> list[RendezvousFiles]:
        """Return all of which a file exists; other files are left alone."""
        with os.scandir(folder) as entries:  # hundreds may share caches, and be looked at often
            matches = [_NAME.fullmatch(entry.name) for entry in entries]
        return [cls(folder, name) for name in sorted({match[1] for match in matches if match})]

    # Made when they are needed: hundreds of names are looked at, often.

    @property
    def socket(self) -> Path:
        """Where the memory is passed on."""
        return self._folder / f"{self.name}.sock"

    @property
    def _serve(self) -> Path:
        return self._folder / f"{self.name}.serve"

    @property
    def _holders(self) -> Path:
        return self._folder / f"{self.name}.holders"

    def state(self) -> object:
        """Return what stays the same for as long as the same memory is held; None: none is."""
        try:
            status = self._holders.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

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


@dataclass(frozen=True)
class Announcement:
    """What the holder of shared memory says about it; all values can be written as JSON."""

    key: str
    """Data set and cache stage, as given to ``open_arena``; or the name of arrays."""
    token: str
    """Random; tells this memory from earlier and later ones of the same key."""
    description: str
    """For display: the data set's root, for example."""
    capacity_bytes: int
    """What its creator asked for."""
    regions: list[dict[str, Any]]
    """The creator's cache regions, as dictionaries."""
    meta: dict[str, Any]
    """The handle's own values."""
    stats: dict[str, Any]
    """Counters at the time of the message."""
    kind: str
    """The kind of memory passed on: an arena, or other memory."""


class Shareable(Protocol):
    """Memory that can be passed on by its descriptors."""

    @property
    def handle(self) -> Handle:
        """Its descriptors, and what else one must know to use them."""
        ...

    def stats(self) -> dict[str, object]:
        """Return what there is to tell of it now."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


_T = TypeVar("_T", bound=Shareable)


@dataclass(frozen=True)
class Joined(Generic[_T]):
    """Shared memory, and this process's part in keeping it findable."""

    held: _T
    participant: Participant
    said: Announcement | None
    """What its holder said of it; None if it was made here."""


def join_or_create(
    wanted: Announcement, key: str, make: Callable[[], _T], attach: Callable[[Handle], _T]
) -> Joined[_T]:
    """Return what this user's processes share under ``key``, made by ``make`` if need be.

    Safe in any thread and process. Raises :class:`OSError` when the runtime directory is not safe
    or a holder does not answer, and whatever ``make`` raises.
    """
    files = RendezvousFiles.of(prepare_runtime_dir(), key)
    begin, pause = time.monotonic(), 0.002
    while True:
        try:
            return join(files, attach)
        except (OSError, SegmentError) as error:
            why = str(error)  # the error itself would keep this frame alive
            silent = isinstance(error, TimeoutError | BlockingIOError)
            useless = isinstance(error, messages.OtherVersion | SegmentError)
        created = _create(files, wanted, make)
        if created is not None:
            return created
        if useless:
            raise ConnectionError(f"{files.socket} serves nothing that can be used here: {why}")
        # No process at the socket: one may be reserving a large arena's memory right now.
        patience = _PATIENCE + (0 if silent else wanted.capacity_bytes / _RESERVING)
        if time.monotonic() - begin > patience:
            raise TimeoutError(f"{files.socket} does not answer: {why}")
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(0.1, pause * 1.5)


def join(
    files: RendezvousFiles, attach: Callable[[Handle], _T], patience: float | None = None
) -> Joined[_T]:
    """Become a holder of what is served there; OSError or SegmentError if there is nothing.

    Who gives up, after ``patience`` seconds (None: 10), loses its place in a crowd of those who
    come at once, and is answered in vain before it is answered again.
    """
    said, fds, _ = inquire(files.socket, _PATIENCE if patience is None else patience)
    try:
        serve, holders = files.join(said.token)
        try:
            held = attach(Handle(tuple(fd.fileno() for fd in fds), said.meta))
            participant = Participant(files, serve, holders, None, held, said)
        except BaseException:
            files.leave(serve, holders)
            raise
    finally:
        for fd in fds:
            descriptors.drop(fd)
    return Joined(held, participant, said)


def _create(
    files: RendezvousFiles, wanted: Announcement, make: Callable[[], _T]
) -> Joined[_T] | None:
    """Make it and serve it; None if another process does, or still has one."""
    serve = files.try_serve()
    if serve is None:
        return None
    holders = None
    try:
        holders = files.try_alone(wanted.token)
    finally:
        if holders is None:
            descriptors.drop(serve)
    if holders is None:
        return None
    made = listener = None
    try:
        made = make()
        said = Announcement(**{**vars(wanted), "meta": dict(made.handle.meta)})
        listener = _listen(files.socket)
        participant = Participant(files, serve, holders, listener, made, said)
    except BaseException:
        if listener is not None:
            descriptors.drop(listener)
        if made is not None:
            made.close()
        files.leave(serve, holders)
        raise
    return Joined(made, participant, None)


class Participant:
    """Makes this process a holder of shared memory: answers for it, or stands by to take over.

    Every holder runs one. The one that has the ``serve`` lock answers on the socket; when that
    process ends, however it does, another gets the lock within a fraction of a second. Standing
    by means looking now and then, not blocking on the lock, because a thread blocked there
    could not be stopped. In a forked child it is inert: the child neither answers nor counts
    as a holder.

    ``serve`` and ``holders`` come from ``files`` and belong to it; with ``listener`` it answers
    from the start. Raises :class:`OSError` when the memory's descriptors cannot be duplicated.
    """

    def __init__(
        self,
        files: RendezvousFiles,
        serve: Descriptor,
        holders: Descriptor,
        listener: socket.socket | None,
        memory: Shareable,
        announcement: Announcement,
    ) -> None:
        self._files, self._serve, self._holders = files, serve, holders
        self._listener = listener
        self._memory = memory
        self._announcement = announcement
        self._generation = descriptors.generation()
        self._own: list[Descriptor] = []
        try:
            with descriptors.no_fork:
                self._wake = self._keep(os.eventfd(0, os.EFD_CLOEXEC))
                # Copies: the memory may be closed first, and its numbers then mean other files.
                self._fds = [self._keep(os.dup(fd)) for fd in memory.handle.fds]
            self._thread = threading.Thread(target=self._run, name="stoker-rendezvous", daemon=True)
            self._thread.start()
        except BaseException:
            for descriptor in self._own:
                descriptors.drop(descriptor)
            raise

    def close(self) -> None:
        """Stop answering and holding; the last holder removes the files. May be called again."""
        if self._generation != descriptors.generation() or not self._thread.is_alive():
            return  # in a child of a fork there is no thread, and nothing left to close
        os.eventfd_write(self._wake.fileno(), 1)
        # The garbage collector may have brought the thread itself here.
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_alone(self) -> bool:
        """Whether no other process holds it; raises OSError when closed."""
        return not is_locked(self._holders.fileno())

    def _keep(self, fd: int) -> Descriptor:
        self._own.append(descriptors.keep(Descriptor(fd)))
        return self._own[-1]

    def _run(self) -> None:
        try:
            self._attend()
        finally:
            if self._listener is not None:
                descriptors.drop(self._listener)
            with contextlib.suppress(OSError):  # files that stay are for `stoker clean`
                self._files.leave(self._serve, self._holders)
            for descriptor in self._own:
                descriptors.drop(descriptor)

    def _attend(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        while True:
            if self._listener is None:
                self._listener = self._take_over()
                if self._listener is not None:
                    poll.register(self._listener, select.POLLIN)
            ready = poll.poll(None if self._listener else _TAKEOVER * 1000)
            if any(fd == self._wake.fileno() for fd, _ in ready):
                return
            if ready and self._listener is not None:
                self._answer(self._listener)

    def _take_over(self) -> socket.socket | None:
        if not try_lock(self._serve.fileno()):
            return None
        try:
            return _listen(self._files.socket)
        except OSError:
            return None  # keeps the lock and tries again: no other process would do better

    def _answer(self, listener: socket.socket) -> None:
        said = dataclasses.replace(self._announcement, stats=self._stats())
        answer(listener, said, [descriptor.fileno() for descriptor in self._fds])

    def _stats(self) -> dict[str, Any]:
        try:
            # A lock of the arena's that is taken here must not stay so in a child.
            with descriptors.no_fork:
                return dict(self._memory.stats())
        except (StokerError, OSError):
            return {}  # closed meanwhile; the memory is still there to attach to


# --- asking and answering ---


def inquire(path: Path, timeout: float = 1.0) -> tuple[Announcement, list[Descriptor], int]:
    """Ask who answers at ``path``; return the announcement, descriptors and holder.

    The descriptors are kept from forks, and the caller's to drop. The holder is a process id, 0
    when it lives in another process namespace. Raises :class:`OSError` if there is no answer
    within ``timeout`` seconds, or not one as a Stoker of this user and version would.
    """
    deadline = time.monotonic() + timeout
    received: list[Descriptor] = []
    connection = messages.connect(path, timeout)
    try:
        pid = messages.peer(connection).pid
        line = messages.read_line(connection, messages.MAX_BYTES, deadline, received)
        return _announcement(line), received, pid
    except BaseException:
        for descriptor in received:
            descriptors.drop(descriptor)
        raise
    finally:
        descriptors.drop(connection)


def answer(listener: socket.socket, said: Announcement, fds: Sequence[int]) -> None:
    """Pass the memory to one process that connected, if it is ours and still there."""
    with descriptors.no_fork:
        try:
            connection = descriptors.keep(listener.accept()[0])
        except OSError:
            return
    try:
        if messages.is_ours(connection):
            line = json.dumps({"stoker": _VERSION, **asdict(said)}, default=_plain) + "\n"
            connection.setblocking(False)
            socket.send_fds(connection, [line.encode()], list(fds))
    except OSError:
        pass  # it has gone away, and may come again
    finally:
        descriptors.drop(connection)


def _announcement(line: bytes) -> Announcement:
    values = messages.parse(line, _VERSION)
    del values["stoker"]
    try:
        said = Announcement(**values)
    except TypeError as error:
        raise ConnectionError(f"the answer is not Stoker's: {error}") from error
    kinds = {"str": str, "int": int, "list[dict[str, Any]]": list, "dict[str, Any]": dict}
    for field in fields(Announcement):
        if not isinstance(getattr(said, field.name), kinds[str(field.type)]):
            raise ConnectionError(f"the answer is not Stoker's: {field.name} is not {field.type}")
    return said


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def _listen(path: Path) -> socket.socket:
    listener = messages.listen(path)
    listener.setblocking(False)  # who asked may have gone before it is accepted
    return listener
