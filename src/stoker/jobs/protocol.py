"""How a job asks the node's service: a line of JSON each way over a Unix socket."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stoker._core import segment_bytes
from stoker.errors import SegmentError
from stoker.node import descriptors
from stoker.node.bandwidth import FetchShare
from stoker.node.messages import OtherVersion, connect, parse, read_line
from stoker.node.rendezvous import RendezvousFiles
from stoker.node.runtime_dir import runtime_dir
from stoker.policy.base import Region
from stoker.store.arena import memory_needed, payload_within
from stoker.store.registry import rendezvous_key
from stoker.types import format_bytes

VERSION = 1
"""Of the messages; each says its own."""
MAX_REQUEST = 1 << 16
MAX_ANSWER = 1 << 22
PATIENCE = 2.0
"""Seconds in which a request has to be complete."""
_ASK_AGAIN = 0.5  # seconds between two requests of a job that waits
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
    connection = connect(at or service_path(), PATIENCE, to_others=at is not None)
    try:
        connection.sendall(line)
        answer = parse(read_line(connection, MAX_ANSWER, deadline), VERSION)
    finally:
        descriptors.drop(connection)
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    return answer


class Allowed(NamedTuple):
    """What a new cache may have."""

    capacity: int
    """Payload bytes: those asked for, or less."""
    fetch_share: FetchShare | None = None
    """What the job has of the fetch bandwidth, together with others; None: a share of its own."""
    limit: int | None = None
    """Payload bytes of these that fit at first, until others have given memory back; None: all."""


def capacity_allowed(
    key: str,
    num_ids: int,
    capacity: int,
    mean_size: float,
    regions: Sequence[Region],
    *,
    wait: float = 0.0,
    job: str = "",
    data: str = "",
) -> Allowed:
    """Return the payload bytes that a new cache may have, of ``capacity``, and the job's share.

    Its name and other properties are the arguments of ``open_arena``. Without a service, or if it
    does not answer, that is all of it. For up to ``wait`` seconds it is asked again until there
    is room for all. ``job`` and ``data`` are told to people who ask the service.
    """
    mean = max(1, round(mean_size))
    needed = segment_bytes(num_ids, capacity, mean, False)
    deadline = time.monotonic() + wait
    while True:
        is_last = time.monotonic() >= deadline
        answer = _ask(
            "admit",
            name=RendezvousFiles.of(runtime_dir(), rendezvous_key(key, num_ids)).name,
            memory=needed,
            capacity=capacity,
            regions=[asdict(region) for region in regions],
            job=job,
            data=data,
            waits=not is_last,
            least=memory_needed(num_ids, capacity, mean, 0),
        )
        room = None if answer is None else answer.get("room")
        if answer is None or room is None:
            break
        if is_last or answer.get("is_final", True):
            break
        time.sleep(min(_ASK_AGAIN, max(0.0, deadline - time.monotonic())))
    answer = answer or {}
    if room is not None:
        # What comes on top of the payload grows with it, but for what each sample takes.
        least = segment_bytes(num_ids, 0, mean, False)
        capacity = max(0, int(capacity * (room - least) / max(1, needed - least)))
    return Allowed(capacity, _fetch_share(answer), _limit(answer, num_ids, capacity, mean))


def _limit(answer: dict[str, Any], num_ids: int, capacity: int, mean: int) -> int | None:
    """Return the payload for which there is memory now, if that is not all of ``capacity``."""
    now = answer.get("now")
    needed = partial(memory_needed, num_ids, capacity, mean)
    if type(now) is not int or now >= needed(capacity):
        return None
    return payload_within(now, capacity, needed)


def _fetch_share(answer: dict[str, Any]) -> FetchShare | None:
    if answer.get("flow") is None:
        return None
    try:
        token, weight = answer["flow"]
        if not 0 < int(token) < 1 << 64:
            raise ValueError(f"{token} stands for no jobs")
        return FetchShare(int(token), float(weight))
    except (TypeError, ValueError) as error:  # ConfigError is one
        log.info("the service of this node names no share of bandwidth: %s", error)
        return None


def check_disk(path: str, size: int, least: int, *, job: str = "", data: str = "") -> int | None:
    """Return the bytes of disk that a disk cache of ``size`` may take at first; None: all.

    ``least``: those that it takes without a sample. ``job`` and ``data`` as in
    :func:`capacity_allowed`. Raises :class:`~stoker.errors.SegmentError` if the service permits no
    disk cache.
    """
    told = _ask("admit_disk", path=path, size=size, least=least, job=job, data=data) or {}
    if (room := told.get("room")) is not None:
        raise SegmentError(
            f"the service of this node has room for {format_bytes(room)} on disk, and a disk cache "
            f"in {path} takes {format_bytes(size)}: ask for less with disk_size=, or give "
            "`stoker serve` more with --disk or --quota"
        )
    now = told.get("now")
    return now if type(now) is int else None


def tell_opened() -> None:
    """Have the service hold what was opened just now, also if the job ends at once."""
    _ask("look")


def _ask(question: str, **values: Any) -> dict[str, Any] | None:
    """Return the answer of the service, with a ``room`` that is a number or None; None if none."""
    if not service_path().exists():
        return None
    try:
        answer = ask(question, **values)
        room = answer.get("room")
        return answer | {"room": None if room is None else int(room)}
    except OtherVersion as error:
        log.warning("training continues without the service of this node: %s", error)
    except (OSError, Refused, ValueError, TypeError) as error:
        log.info("the service of this node does not answer (%s): training continues", error)
    return None
