"""Messages with descriptors between a rank and the prefetch process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.store.handshake import SocketAddress, bind, check_served_by_us, peer

ALIVE_EVERY = 0.5
"""Seconds between two signs of life from the prefetch process to each rank."""

_MAX_BYTES = 1 << 16
_MAX_FDS = 8


def pid_namespace() -> int:
    """Return what tells this process's pid namespace from others."""
    return Path("/proc/self/ns/pid").stat().st_ino


class Channel:
    """One connection that carries small JSON objects, each with descriptors; whole or not at all.

    The other end belongs to the same user: the runtime directory admits no other user, and
    :meth:`user` says who it is. One thread receives, one sends. Every method raises OSError when
    the connection fails.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, path: Path, timeout: float = 1.0) -> Channel:
        """Connect to the listener at ``path``."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout)
            with SocketAddress(path) as address:
                connection.connect(address)
            check_served_by_us(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    @staticmethod
    def listen(path: Path) -> socket.socket:
        """Return a socket bound to ``path``; raises as :func:`stoker.store.handshake.bind`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            bind(listener, path)
        except BaseException:
            listener.close()
            raise
        return listener

    def user(self) -> int:
        """Return the user id at the other end, as the kernel knows it."""
        return peer(self._connection).user

    def fileno(self) -> int:
        """Return the descriptor, for ``poll``; -1 when closed."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message with copies of ``fds``."""
        socket.send_fds(self._connection, [json.dumps(message).encode()], list(fds))

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which become ours; None at the end.

        Raises OSError too for a malformed message.
        """
        line, fds, flags, _ = socket.recv_fds(
            self._connection, _MAX_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
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
            raise ConnectionError(f"not a message of Stoker's prefetch: {error}") from error
        return message, fds

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        self._connection.close()
