"""What a library has open, once in each process: for libraries that do not survive a fork."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from stoker.errors import ConfigError

T = TypeVar("T")


class OwnHandle(Generic[T]):
    """Opens when it is first used in a process; a forked child opens its own.

    The child lets go of what its parent had open, which must be for reading only. Pickles without
    it. Threads take turns.
    """

    def __init__(self, make: Callable[[], T], shut: Callable[[T], Any]) -> None:
        """``make`` opens, ``shut`` closes; both pickle."""
        self._make, self._shut = make, shut
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._turn = threading.Lock()
        self._opened: T | None = None
        _handles.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_shut": self._shut, "_closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @contextmanager
    def use(self) -> Iterator[T]:
        """Give what is open, to one thread at a time; raises :class:`ConfigError` once closed."""
        with self._turn:
            if self._closed:
                raise ConfigError("this source is closed: make a new one to read from")
            if self._opened is None:
                self._opened = self._make()
            yield self._opened

    def close(self) -> None:
        """Close what this process has open, for good; may be called again."""
        with self._turn:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            self._shut(opened)

    def leave(self) -> None:
        """Let go of what the parent had open."""
        self._turn, self._opened = threading.Lock(), None


_handles: weakref.WeakSet[OwnHandle[Any]] = weakref.WeakSet()


def _in_child() -> None:
    for handle in list(_handles):
        handle.leave()


os.register_at_fork(after_in_child=_in_child)
