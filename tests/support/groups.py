"""A service that shares folders among the users of a group, and members of it."""

from __future__ import annotations

import contextlib
import grp
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.group_files import SharedFolder
from stoker.jobs.protocol import ask
from stoker.jobs.service import Service, ServiceSettings
from support.users import as_other
from support.waiting import until

GROUP = grp.getgrgid(65534) if any(g.gr_gid == 65534 for g in grp.getgrall()) else None
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
    with Service(ServiceSettings(**(given | settings))) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            until(lambda: len(told()) == len(shares))
            yield service
        finally:
            service.stop()
            thread.join()


def told() -> list[dict[str, Any]]:
    return list(ask("list")["shared"])


def read_for(user: int) -> int:
    """How many files the service read for a user."""
    return int(told()[0]["users"].get(str(user), {"read": 0})["read"])


def act_as_member(user: int, act: Callable[[], object]) -> None:
    as_other(act, user=user, groups=[65534])
