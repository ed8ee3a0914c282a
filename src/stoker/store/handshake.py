"""How a process that holds an arena passes it on: one message over a Unix socket.

A client gets one line of JSON with the arena's descriptors attached, and the connection
is closed. The server reads nothing, so no client can make it wait or feed it anything. Both sides
ask the kernel for the other's user and reject other users.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker.errors import UntrustedPlace
from stoker.owned import remove_socket
from stoker.store import unforked
from stoker.store.unforked import Descriptor

_VERSION = 2
_MAX_BYTES = 1 << 16
_MAX_FDS = 16
_LONGEST_ADDRESS = 107  # bytes in sockaddr_un, less the closing zero


@dataclass(frozen=True)
class Announcement:
    """What the holder of an arena says about it; all values can be written as JSON."""

    key: str
    """Data set and cache stage, as given to ``open_arena``."""
    token: str
    """Random; tells this arena from earlier and later ones of the same key."""
    description: str
    """For display: the data set's root, for example."""
    capacity_bytes: int
    """What its creator asked for."""
    regions: list[dict[str, Any]]
    """The creator's cache regions, as dictionaries."""
    meta: dict[str, Any]
    """The arena handle's own values."""
    stats: dict[str, Any]
    """The arena's counters at the time of the message."""
    kind: str
    """The kind of memory passed on: an arena, or other memory."""


class Peer(NamedTuple):
    """The process and user at the other end of a connection, from the kernel."""

    pid: int
    """0 when it lives in another process namespace."""
    user: int
    group: int


def peer(connection: socket.socket) -> Peer:
    """Return the peer of a connection; of a listening socket, the process that made it listen."""
    size = struct.calcsize("iII")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return Peer(*struct.unpack("iII", raw))


def check_served_by_us(connection: socket.socket, path: Path) -> Peer:
    """Return the peer that serves at ``path``; UntrustedPlace unless it is this user."""
    there = peer(connection)
    if there.user != os.geteuid():
        raise UntrustedPlace(f"{path} is served by user {there.user}: set STOKER_RUNTIME_DIR")
    return there


def bind(listener: socket.socket, path: Path) -> None:
    """Bind a socket to ``path``, in place of one of ours that is left there, and listen.

    Only this user may connect. Raises :class:`OSError`, among them
    :class:`~stoker.errors.UntrustedPlace` for a file that is not a socket of this user, which
    stays.
    """
    remove_socket(path)
    os.fchmod(listener.fileno(), 0o600)  # which the name then has from the start
    with SocketAddress(path) as address:
        listener.bind(address)
    listener.listen(256)


def listen(path: Path) -> socket.socket:
    """Return a socket bound to ``path`` as :func:`bind` does, which does not block."""
    with unforked.no_fork:
        listener = unforked.keep(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        listener.setblocking(False)
        bind(listener, path)
    except BaseException:
        unforked.drop(listener)
        raise
    return listener


def answer(listener: socket.socket, said: Announcement, fds: Sequence[int]) -> None:
    """Pass the arena to one process that connected, if it is ours and still there."""
    with unforked.no_fork:
        try:
            connection = unforked.keep(listener.accept()[0])
        except OSError:
            return
    try:
        if peer(connection).user == os.geteuid():
            line = json.dumps({"stoker": _VERSION, **asdict(said)}, default=_plain) + "\n"
            connection.setblocking(False)
            socket.send_fds(connection, [line.encode()], list(fds))
    except OSError:
        pass  # it has gone away, and may come again
    finally:
        unforked.drop(connection)


def inquire(path: Path, timeout: float = 1.0) -> tuple[Announcement, list[Descriptor], int]:
    """Ask who listens at ``path``; return the arena's announcement, descriptors and holder.

    The descriptors are not inherited by forks, and the caller drops them. The holder is a process
    id, 0 when it lives in another process namespace. Raises :class:`OSError` if there is no answer
    within ``timeout`` seconds, or not as a Stoker of this user and version would.
    """
    deadline = time.monotonic() + timeout
    with unforked.no_fork:
        connection = unforked.keep(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    received: list[Descriptor] = []
    try:
        connection.settimeout(timeout)
        with SocketAddress(path) as address:
            connection.connect(address)
        pid = check_served_by_us(connection, path).pid
        return _parse(_receive_line(connection, received, deadline)), received, pid
    except BaseException:
        for descriptor in received:
            unforked.drop(descriptor)
        raise
    finally:
        unforked.drop(connection)


def _receive_line(connection: socket.socket, received: list[Descriptor], deadline: float) -> bytes:
    """Return one line, and append the descriptors that came with it to ``received``."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > _MAX_BYTES:
            raise ConnectionError(f"an answer of more than {_MAX_BYTES} bytes")
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        # Wait outside the section: in it, every fork of this process would have to wait too.
        connection.recv(1, socket.MSG_PEEK)
        with unforked.no_fork:
            part, fds = _receive(connection)
            received += [unforked.keep(Descriptor(fd)) for fd in fds]
        if not part:
            raise ConnectionError("the answer was cut short")
        line += part
    return line


def _receive(connection: socket.socket) -> tuple[bytes, array[int]]:
    """Return some bytes and the descriptors sent along, which programs started do not inherit."""
    fds = array("i")
    # socket.recv_fds would ignore the flags.
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
    part, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, space, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return part, fds


def _parse(line: bytes) -> Announcement:
    try:
        values = json.loads(line)
        if values.pop("stoker") != _VERSION:
            raise ConnectionError("another version of Stoker answers there")
        said = Announcement(**values)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
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


class SocketAddress:
    """A socket's path in a form that fits an address, however long the path is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: Descriptor | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _LONGEST_ADDRESS:
            return str(self._path)
        with unforked.no_fork:
            folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._folder = unforked.keep(Descriptor(folder))
        short = f"/proc/self/fd/{folder}/{self._path.name}"
        if len(short) > _LONGEST_ADDRESS:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(self._path))
        return short

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            unforked.drop(self._folder)
