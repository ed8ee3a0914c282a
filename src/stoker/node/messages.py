"""Messages between our processes over Unix sockets: who is there, lines and packets of JSON.

Both sides ask the kernel for the other's user and turn strangers away. A **line** ends at its
newline, for a client that asks or is told one thing (:func:`read_line`, :func:`parse`); a
:class:`Channel` carries **packets** for as long as it is open. Both may bring descriptors.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import UntrustedPath
from stoker.node import descriptors
from stoker.node.descriptors import Descriptor
from stoker.node.owned import remove_socket

MAX_BYTES = 1 << 16
"""Of a packet, and of a line that one process tells another unasked."""

MAX_FDS = 16
"""Descriptors that come with a packet, or with a part of a line."""

_PEERGROUPS = 59  # SO_PEERGROUPS, which Python does not name
_MOST_GROUPS = 256  # that Python can be told
_LONGEST_ADDRESS = 107  # bytes in sockaddr_un, less the closing zero


# --- who is there ---


class Peer(NamedTuple):
    """Who is at the other end of a connection, as the kernel knows it."""

    pid: int
    """0 when it lives in another process namespace."""
    user: int
    group: int


def peer(connection: socket.socket) -> Peer:
    """Return who is at the other end; of a socket that listens there, who made it listen."""
    size = struct.calcsize("iII")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return Peer(*struct.unpack("iII", raw))


def is_member(connection: socket.socket, group: int) -> bool:
    """Whether who is at the other end was in ``group`` when it connected, by the kernel."""
    if peer(connection).group == group:
        return True
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _MOST_GROUPS * 4)
    except OSError:
        return False  # too many to be told
    return group in struct.unpack(f"{len(raw) // 4}I", raw)


def is_ours(connection: socket.socket) -> bool:
    """Whether this user is at the other end."""
    return peer(connection).user == os.geteuid()


def check_served_by_us(connection: socket.socket, path: Path) -> Peer:
    """Return who serves at ``path``; UntrustedPath unless it is this user."""
    there = peer(connection)
    if there.user != os.geteuid():
        raise UntrustedPath(f"{path} is served by user {there.user}: set STOKER_RUNTIME_DIR")
    return there


# --- connecting ---


def bind(listener: socket.socket, path: Path) -> None:
    """Bind a socket to ``path``, in place of one of ours that is left there, and listen.

    Only this user may connect. Raises :class:`OSError`, among them
    :class:`~stoker.errors.UntrustedPath` for what is no socket of this user's, which stays.
    """
    remove_socket(path)
    os.fchmod(listener.fileno(), 0o600)  # which the name then has from the start
    with SocketAddress(path) as address:
        listener.bind(address)
    listener.listen(1024)


def listen(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket bound to ``path`` as :func:`bind` does, kept from forks; it blocks."""
    listener = _kept(kind)
    try:
        bind(listener, path)
    except BaseException:
        descriptors.drop(listener)
        raise
    return listener


def open_to(path: Path, group: int | None) -> int:
    """Let the members of ``group`` connect to the socket at ``path``; return its inode."""
    # By descriptor: in a folder of others the name may lead elsewhere by now.
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise UntrustedPath(
                f"{path} was replaced meanwhile: use a directory that is yours alone"
            )
        if group is not None:
            os.chown(f"/proc/self/fd/{fd}", -1, group)
            Path(f"/proc/self/fd/{fd}").chmod(0o660)
        return status.st_ino
    finally:
        os.close(fd)


def connect(
    path: Path,
    timeout: float,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    *,
    to_others: bool = False,
) -> socket.socket:
    """Return a connection to the process that listens at ``path``, kept from forks; drop it.

    It must be this user, or with ``to_others`` anybody. Raises :class:`OSError`.
    """
    connection = _kept(kind)
    try:
        connection.settimeout(timeout)
        with SocketAddress(path) as address:
            connection.connect(address)
        if not to_others:
            check_served_by_us(connection, path)
    except BaseException:
        descriptors.drop(connection)
        raise
    return connection


class SocketAddress:
    """A socket's path in a form that fits an address, however long the path is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: Descriptor | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _LONGEST_ADDRESS:
            return str(self._path)
        with descriptors.no_fork:
            folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._folder = descriptors.keep(Descriptor(folder))
        short = f"/proc/self/fd/{folder}/{self._path.name}"
        if len(short) > _LONGEST_ADDRESS:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(self._path))
        return short

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            descriptors.drop(self._folder)


def _kept(kind: socket.SocketKind) -> socket.socket:
    with descriptors.no_fork:
        return descriptors.keep(socket.socket(socket.AF_UNIX, kind))


# --- lines ---


def read_line(
    connection: socket.socket,
    most: int,
    deadline: float,
    received: list[Descriptor] | None = None,
) -> bytes:
    """Return one line, and append the descriptors that came with it, kept, to ``received``.

    Without ``received`` descriptors are turned away. Raises OSError for a line of more than
    ``most`` bytes, one that is cut short, and one that is not there at ``deadline``, by the
    monotonic clock.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the line took too long")
        connection.settimeout(left)
        # Wait outside the section: in it, every fork of this process would have to wait too.
        connection.recv(1, socket.MSG_PEEK)
        with descriptors.no_fork:
            room = 0 if received is None else MAX_FDS
            part, fds, _ = _receive(connection, most + 1 - len(line), room, socket.MSG_DONTWAIT)
            if received is not None:
                received += [descriptors.keep(Descriptor(fd)) for fd in fds]
        if not part:
            raise ConnectionError("the line was cut short")
        line += part
        if len(line) > most:
            raise ConnectionError(f"a line of more than {most} bytes")
    return bytes(line)


class OtherVersion(ConnectionError):
    """The other end is a Stoker whose messages are of another version: it stays so."""


def parse(line: bytes, version: int) -> dict[str, Any]:
    """Return the message of a line.

    Raises :class:`ConnectionError` if it is none, and :class:`OtherVersion`.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"that is no JSON: {error}") from error
    theirs = message.get("stoker") if isinstance(message, dict) else None
    if type(theirs) is not int:
        raise ConnectionError("that is no message of Stoker's")
    if theirs != version:
        raise OtherVersion(
            f"the other end is another version of Stoker, with messages of version {theirs} and "
            f"not {version}"
        )
    return dict(message)


def _receive(
    connection: socket.socket, most: int, most_fds: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Return some bytes, the descriptors sent along, and the flags of the message.

    Programs that are started do not inherit the descriptors.
    """
    fds = array("i")
    space = socket.CMSG_SPACE(most_fds * fds.itemsize) if most_fds else 0
    # socket.recv_fds would ignore the flags.
    flags |= socket.MSG_CMSG_CLOEXEC
    part, ancillary, told, _ = connection.recvmsg(most, space, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return part, fds.tolist(), told


# --- packets ---


class Channel:
    """One connection that carries small JSON objects, each with descriptors; whole or not at all.

    The other end belongs to the same user: the runtime directory admits no other user, and
    :meth:`is_ours` asks the kernel. One thread receives, one sends. Closed in forked children if
    it was made by :meth:`connect`. Every method raises OSError when the connection fails.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, path: Path, timeout: float = 1.0) -> Channel:
        """Connect to this user's process that listens at ``path``."""
        return cls(connect(path, timeout, socket.SOCK_SEQPACKET))

    @staticmethod
    def listen(path: Path) -> socket.socket:
        """Return a socket bound to ``path``, kept from forks; raises as :func:`bind`."""
        return listen(path, socket.SOCK_SEQPACKET)

    @classmethod
    def accept(cls, listener: socket.socket) -> Channel | None:
        """Return a channel to the process that connects at ``listener``, None for a stranger."""
        channel = cls(listener.accept()[0])
        if is_ours(channel._connection):
            channel._connection.setblocking(True)
            return channel
        channel.close()
        return None

    def fileno(self) -> int:
        """Return the descriptor, for ``poll``; -1 when closed."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), *, waits: bool = True) -> None:
        """Send one message with copies of ``fds``.

        Unless it ``waits``, BlockingIOError if the other end has not taken what came before.
        """
        given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        # socket.send_fds would ignore the flags.
        flags = 0 if waits else socket.MSG_DONTWAIT
        self._connection.sendmsg([json.dumps(message).encode()], given, flags)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which become ours; None at the end.

        Raises OSError too for what is no message.
        """
        line, fds, flags = _receive(self._connection, MAX_BYTES, MAX_FDS)
        if not line and not fds:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("it is too long")
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            for fd in fds:
                os.close(fd)
            raise ConnectionError(f"not a message of Stoker's: {error}") from error
        return message, fds

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        descriptors.drop(self._connection)
