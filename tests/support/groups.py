"""A service that shares folders among the users of a group, and members of it."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.jobs.group_files import SharedFolder
from stoker.jobs.protocol import ask
from stoker.jobs.service import Service
from stoker.node import messages
from stoker.pool.group_pool import VERSION
from stoker.source.image_folder import ImageFolderSource
from support import services
from support.users import as_other
from support.waiting import until

GROUP = grp.getgrgid(65534) if any(g.gr_gid == 65534 for g in grp.getgrall()) else None
CLASSES, PER_CLASS = 3, 10
needs_group = pytest.mark.skipif(GROUP is None, reason="this system has no group 65534")


@contextlib.contextmanager
def serving(place: Path, *shares: str, **settings: Any) -> Iterator[Service]:
    """A service at ``place/s.sock``, once it has listed what it shares."""
    assert GROUP is not None
    given = {
        "socket": place / "s.sock",
        "group": GROUP.gr_name,
        "shares": tuple(map(SharedFolder.parse, shares)),
    }
    with services.serving(**(given | settings)) as service:
        until(lambda: len(told()) == len(shares))
        yield service


def told() -> list[dict[str, Any]]:
    return list(ask("list")["shared"])


def read_for(user: int) -> int:
    """How many files the service read for a user."""
    return int(told()[0]["users"].get(str(user), {"read": 0})["read"])


def act_as_member(user: int, act: Callable[[], object]) -> None:
    as_other(act, user=user, groups=[65534])


def make_folder(place: Path) -> Path:
    """Class folders that every user can read."""
    rng = np.random.default_rng(0)
    for number in range(CLASSES):
        folder = place / "data" / f"class{number}"
        folder.mkdir(parents=True)
        for file in range(PER_CLASS):
            (folder / f"{file}.jpg").write_bytes(rng.bytes(1000 + 100 * file))
    return place / "data"


def files_of(root: Path) -> ImageFolderSource:
    return ImageFolderSource(root, cache_listing=False)


@contextlib.contextmanager
def joining(path: Path, files: ImageFolderSource) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """A member's connection, and what the service said to its first message."""
    connection = messages.connect(path, 10.0, to_others=True)
    with connection:
        message = {"ask": "join", "fingerprint": files.fingerprint, "local": files.local_identity}
        connection.sendall(json.dumps({"stoker": VERSION, **message}).encode() + b"\n")
        yield connection, json.loads(connection.recv(1 << 16))


def proved(connection: socket.socket, fds: list[int]) -> dict[str, Any]:
    """The answer to descriptors; ``fd`` is what came with it."""
    socket.send_fds(connection, [json.dumps({"stoker": VERSION}).encode() + b"\n"], fds)
    line, received, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    return json.loads(line) | {"fd": received[0] if received else -1}


@contextlib.contextmanager
def joined(path: Path, files: ImageFolderSource) -> Iterator[socket.socket]:
    """A member's connection, once it was let in."""
    with joining(path, files) as (connection, said):
        fds = [os.open(files.name(sample), os.O_RDONLY) for sample in said["prove"]]
        answer = proved(connection, fds)
        for fd in [*fds, answer["fd"]]:
            os.close(fd)
        yield connection
