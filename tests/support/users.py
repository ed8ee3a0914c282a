"""A second user, for tests of what another user can do; root alone can be two."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence

import pytest

OTHER = 54321
"""The other user's number, and that of its group; nobody is called that."""

needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0, reason="root alone can act as two users, and this is not root"
)


def as_other(act: Callable[[], object], *, user: int = OTHER, groups: Sequence[int] = ()) -> None:
    """Do something as the other user, in a child of its own; it must not fail."""
    child = begin_as_other(act, user=user, groups=groups)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def begin_as_other(
    act: Callable[[], object], *, user: int = OTHER, groups: Sequence[int] = ()
) -> int:
    """Begin that, and return the child's number; the caller waits for it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child
