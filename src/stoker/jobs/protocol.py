"""How a job asks the node's service: a line of JSON each way over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker import _core
from stoker.errors import SegmentError
from stoker.policy.base import Region
from stoker.runtime_dir import runtime_dir
from stoker.store.handshake import SocketAddress, check_served_by_us
from stoker.store.place import Place
from stoker.store.registry import meeting_key
from stoker.types import format_bytes

VERSION = 1
"""Of the messages; each says its own."""
MAX_REQUEST = 1 << 16
MAX_ANSWER = 1 << 22
PATIENCE = 2.0
"""Seconds in which a request has to be complete."""
log = logging.getLogger("stoker")


class Refused(Exception):
    """The service said no; the message says why."""


def service_path() -> Path:
    """Return where the service of this user listens."""
    return runtime_dir() / "service.sock"


def ask(question: str, at: Path | None = None, /, **values: Any) -> dict[str, Any]:
    """Return the answer of the service ``at`` a socket, by default this user's own.

    The answer of a service named by ``at`` is not to be trusted: only show it. Raises
    :class:`OSError` if there is no answer in time, not as a service of this version would, or, by
    default, another user does; and :class:`Refused` if the service says no.
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


def capacity_allowed(
    key: str, num_ids: int, capacity: int, mean_size: float, regions: Sequence[Region]
) -> int:
    """Return the payload bytes that a new cache may have: ``capacity``, or less.

    Its name and other properties are the arguments of ``open_arena``. Without a service, or if it
    does not answer, returns ``capacity``.
    """
    mean = max(1, round(mean_size))
    needed = _core.segment_bytes(num_ids, capacity, mean, False)
    room = _ask(
        "admit",
        name=Place.of(runtime_dir(), meeting_key(key, num_ids)).name,
        memory=needed,
        capacity=capacity,
        regions=[asdict(region) for region in regions],
    )
    if room is None:
        return capacity
    # What comes on top of the payload grows with it, but for what each sample takes.
    least = _core.segment_bytes(num_ids, 0, mean, False)
    return max(0, int(capacity * (room - least) / max(1, needed - least)))


def check_disk(path: str, size: int) -> None:
    """Raise :class:`~stoker.errors.SegmentError` if the service permits no disk cache."""
    room = _ask("admit_disk", path=path, size=size)
    if room is not None:
        raise SegmentError(
            f"the service of this node has room for {format_bytes(room)} on disk, and a disk cache "
            f"in {path} takes {format_bytes(size)}: ask for less with disk_cache=, or give "
            "`stoker serve` more with --disk"
        )


def tell_opened() -> None:
    """Have the service hold what was opened just now, also if the job ends at once."""
    _ask("look")


def _ask(question: str, **values: Any) -> int | None:
    """Return the room that the service has, None if that is enough or unknown."""
    if not service_path().exists():
        return None
    with contextlib.suppress(OSError, Refused, ValueError, TypeError):
        room = ask(question, **values).get("room")
        return None if room is None else int(room)
    log.info("the service of this node does not answer: training continues without it")
    return None
