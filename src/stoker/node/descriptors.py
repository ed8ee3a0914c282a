"""Descriptors: owned once, closed in forked children, passed on to processes that are spawned.

A lock of an open file description lives as long as any copy of its descriptor, and a listening
socket likewise. Workers are forked all the time and may outlive their parent; a copy in one of
them would make the parent look alive. Everything kept here is closed in the child right after
the fork, and no fork can happen between opening a descriptor and keeping it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any, Protocol, Self, TypeVar


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
    """Owns one descriptor. Also a context manager. Threads may share it."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep(thing: _T) -> _T:
    """Close ``thing`` in children forked from now on; call it with :data:`no_fork` held."""
    _kept.add(thing)
    return thing


def drop(thing: Closable) -> None:
    """Close something kept."""
    with no_fork:
        _kept.discard(thing)
        thing.close()


def reopen(fd: int) -> Descriptor:
    """Return another description of the file that ``fd`` has open, kept; its locks are its own.

    Raises :class:`OSError` where there is no ``/proc``.
    """
    with no_fork:
        return keep(Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)))


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


@dataclass(frozen=True)
class Handle:
    """What another process needs to join shared memory.

    Pickling it while a child process is being spawned passes the descriptors on; at any other time
    it raises TypeError, since a descriptor's number means nothing in another process.
    """

    fds: tuple[int, ...]
    """Descriptors of the memory, for an arena on disk followed by that of the file. They belong to
    the object the handle came from."""
    meta: Mapping[str, Any]
    """JSON-able facts that one must know to map it."""

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise TypeError(
                "an arena's handle can be pickled only for a child process that is being spawned: "
                "pass it as an argument of multiprocessing's Process"
            )
        return _received, (tuple(reduction.DupFd(fd) for fd in self.fds), dict(self.meta))


class _Received(Handle):
    """A handle whose descriptors are this process's own copies, closed when it goes."""

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _received(fds: tuple[Any, ...], meta: dict[str, Any]) -> Handle:
    return _Received(tuple(fd.detach() for fd in fds), meta)
