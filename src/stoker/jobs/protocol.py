"""How one asks the node's service: a line of JSON each way over a Unix socket."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from stoker.runtime_dir import runtime_dir
from stoker.store.handshake import SocketAddress, check_served_by_us

VERSION = 1
"""Of the messages; each says its own."""
MAX_REQUEST = 1 << 16
MAX_ANSWER = 1 << 22
PATIENCE = 2.0
"""Seconds in which a request has to be complete."""


class Refused(Exception):
    """The service said no; the message says why."""


def service_path() -> Path:
    """Return where the service of this user listens."""
    return runtime_dir() / "service.sock"


def ask(question: str, at: Path | None = None, /, **values: Any) -> dict[str, Any]:
    """Return the answer of the service ``at`` a socket, by default this user's own.

    What one answers who is named by ``at`` may be anybody's word: it is for showing. Raises
    :class:`OSError` if nobody answers in time, not as a service of this version would, or, by
    default, another user does; and :class:`Refused` if it refuses.
    """
    line = json.dumps({"stoker": VERSION, "ask": question, **values}).encode() + b"\n"
    deadline = time.monotonic() + PATIENCE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        with SocketAddress(at or service_path()) as address:
            connection.connect(address)
        if at is None:
            check_served_by_us(connection, service_path())
        connection.sendall(line)
        answer = parse(read_line(connection, MAX_ANSWER, deadline))
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    return answer


def read_line(connection: socket.socket, most: int, deadline: float) -> bytes:
    """Return a line of at most ``most`` bytes; OSError if it is longer, cut short or late."""
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the line took too long")
        connection.settimeout(left)
        part = connection.recv(min(1 << 16, most + 1 - len(line)))
        if not part:
            raise ConnectionError("the line was cut short")
        line += part
        if len(line) > most:
            raise ConnectionError(f"a line of more than {most} bytes")
    return bytes(line)


def parse(line: bytes) -> dict[str, Any]:
    """Return the message of a line; ConnectionError if it is none, or of another version."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"that is no JSON: {error}") from error
    if not isinstance(message, dict) or message.get("stoker") != VERSION:
        raise ConnectionError(f"that is no message of version {VERSION}")
    return message
