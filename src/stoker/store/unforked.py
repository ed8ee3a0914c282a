"""Descriptors that a forked child must not keep.

A lock of an open file description lives as long as any copy of its descriptor, and a listening
socket likewise. Workers are forked all the time and may outlive their parent; a copy in one of
them would make the parent look alive. Everything kept here is closed in the child right after
the fork, and no fork can happen between opening a descriptor and keeping it.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol, TypeVar


class Closable(Protocol):
    """What can be kept: an owner of descriptors."""

    def close(self) -> None:
        """Close them; a second call does nothing."""
        ...


_T = TypeVar("_T", bound=Closable)

_kept: set[Closable] = set()
_generation = 0

# Reentrant, so that a signal handler that forks inside the section does not deadlock.
no_fork = threading.RLock()
"""Held while a descriptor is opened and kept. Such a section must not wait for long."""


class Descriptor:
    """Owns one descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor; -1 when it was closed."""
        return self._fd

    def close(self) -> None:
        """Close it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def keep(thing: _T) -> _T:
    """Close ``thing`` in children forked from now on; call it with :data:`no_fork` held."""
    _kept.add(thing)
    return thing


def drop(thing: Closable) -> None:
    """Close something kept."""
    with no_fork:
        _kept.discard(thing)
        thing.close()


def generation() -> int:
    """Return how many forks lie between this process and the first: differs in a child."""
    return _generation


def _close_in_child() -> None:
    global _generation
    _generation += 1
    for thing in _kept:
        thing.close()
    _kept.clear()
    no_fork.release()


os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_close_in_child
)
