"""What a supervised process is made of: those who are connected to it, how it starts and ends.

Its argument is a connection, by descriptor, on which it is given the pickled job, the socket where
ranks connect, and the lock that says there is such a process. It ends when no rank is connected any
more.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.node import child
from stoker.node.hosting import STAYS, taken_over
from stoker.node.messages import Channel

log = logging.getLogger("stoker.node")

ALIVE_EVERY = 0.5
"""Seconds between two signs of life of a process to those who watch it."""

_LINGER = 5.0  # seconds to wait for the first rank
_AFTERWARDS = 0.5  # and for another one after the last: memory and disk are held meanwhile


class Member(Protocol):
    """A connected rank."""

    channel: Channel

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Carry out a message; ``fds`` are closed afterwards.

        Raises LookupError, ValueError, TypeError, OverflowError, OSError or StokerError for what
        makes no sense.
        """
        ...

    def close(self) -> None:
        """Release the rank, and close its channel."""
        ...


M = TypeVar("M", bound=Member)


class Members(Generic[M]):
    """The ranks that connect at ``listener``; ``join`` makes a member of each. One thread.

    What becomes readable at the descriptor ``wake`` ends a pause; to read it is the caller's part.
    """

    def __init__(
        self, listener: socket.socket, join: Callable[[Channel], M], wake: int | None = None
    ) -> None:
        listener.setblocking(False)
        self._listener, self._join = listener, join
        self._members: dict[int, M] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        if wake is not None:
            self._poll.register(wake, select.POLLIN)
        self._wake = wake
        self._said = self._last = time.monotonic()
        self._patience = _LINGER

    @property
    def all(self) -> list[M]:
        """Those who are connected."""
        return list(self._members.values())

    def attend(self, pause: float) -> bool:
        """Handle messages for ``pause`` seconds; return whether there were any."""
        ready = [fd for fd, _ in self._poll.poll(pause * 1000) if fd != self._wake]
        for fd in ready:
            if fd == self._listener.fileno():
                self._admit()
            elif not _hear(self._members[fd]):
                self._poll.unregister(fd)
                self._members.pop(fd).close()
        now = time.monotonic()
        if self._members:
            self._last, self._patience = now, _AFTERWARDS
        if now - self._said >= ALIVE_EVERY:
            self._said = now
            self.tell({})
        return bool(ready)

    def tell(self, message: dict[str, Any]) -> None:
        """Send ``message`` to all, with a sign of life; those who do not listen miss it."""
        alive = {"pid": os.getpid(), "namespace": pid_namespace()}
        for member in self._members.values():
            with contextlib.suppress(OSError):  # one that is suspended holds up no other
                member.channel.send(alive | message, waits=False)

    @property
    def are_gone(self) -> bool:
        """Whether there have been no clients for so long that it is time to end."""
        return not self._members and time.monotonic() - self._last >= self._patience

    def _admit(self) -> None:
        try:
            channel = Channel.accept(self._listener)
        except OSError:
            return
        if channel is None:
            return
        self._members[channel.fileno()] = self._join(channel)
        self._poll.register(channel.fileno(), select.POLLIN)
        self._said = 0.0  # it need not wait for a sign of life


def _hear(member: Member) -> bool:
    """Take one message; False when the rank has disconnected or sends nonsense."""
    try:
        received = member.channel.receive()
    except OSError:
        return False
    if received is None:
        return False
    message, fds = received
    try:
        member.obey(message, fds)
    except (LookupError, ValueError, TypeError, OverflowError, OSError, StokerError):
        log.info("a rank sent an invalid message: %s", message)
        return False
    finally:
        for fd in fds:
            os.close(fd)
    return True


def mapped(fd: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the shared memory of ``fd`` as an array; it stays mapped as long as the array."""
    size = os.fstat(fd).st_size
    return np.frombuffer(mmap.mmap(fd, size), dtype, size // np.dtype(dtype).itemsize)


def lock_of(path: Path) -> Path:
    """Return the file locked by the process whose socket is at ``path``."""
    return path.with_name(f"{path.name}-lock")


def pid_namespace() -> int:
    """Return what tells this process's pid namespace from others."""
    return Path("/proc/self/ns/pid").stat().st_ino


def write_holder(lock: int, pid: int) -> None:
    """Write into the file of a lock, by descriptor, which process of ours holds it from now on."""
    with contextlib.suppress(OSError):  # a full disk: then it is not ended when it hangs
        os.pwrite(lock, f"{pid} {pid_namespace()}".encode(), 0)


def go_to_background(*ignored: signal.Signals) -> tuple[Any, socket.socket, Path]:
    """Return what this process was started with: the job, the socket, and the socket's path.

    From here on the process that started it need not wait for its end, unless it wants to, and it
    ignores the signals ``ignored``. The lock that says there is such a process stays held until it
    ends; the number of the process is in the file of the lock.
    """
    stays = sys.argv[2:] == [STAYS]
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(True)  # who passed it on may have waited for a limited time only
    given = None
    with contextlib.closing(Channel(connection)) as channel, contextlib.suppress(OSError):
        if stays:
            channel.send({"pid": os.getpid()})
        given = taken_over(channel)
    if given is None:  # the job has given up, and may have started one itself
        os._exit(1)
    pid = os.getpid() if stays else os.fork()
    if pid:
        write_holder(given.lock, pid)
        if not stays:
            os._exit(0)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    return child.load(given.job), socket.socket(fileno=given.listener), given.path


def run(serve: Callable[[Any, socket.socket], None]) -> None:
    """Be the process: ``serve(job, listener)`` on what it was started with; does not return."""
    job, listener, path = go_to_background(signal.SIGINT)  # Ctrl-C is for the training loop
    serve(job, listener)
    for file_of_ours in (path, lock_of(path)):  # in this order: who locks again binds again
        with contextlib.suppress(OSError):
            file_of_ours.unlink()
    logging.shutdown()
    os._exit(0)  # clients of storages run threads that do not end
