"""What the prefetch process is given when it starts, descriptors included."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from multiprocessing import context
from typing import Any

from stoker.source.base import Source
from stoker.store.memory import MemoryTier
from stoker.store.stacked import StackedTier


@dataclass(frozen=True)
class Job:
    """The samples to fetch and the cache to fill."""

    source: Source
    tier: MemoryTier | StackedTier
    """The cache; the process takes part in its memory, and its disk if there is one."""


class _Passed:
    """A descriptor that the child inherits under its number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


class _Passing:
    """Stands in for the process being spawned while multiprocessing pickles descriptors."""

    DupFd = _Passed

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        # A copy, since the child takes over each of them on its own.
        self.fds.append(os.dup(fd))
        return self.fds[-1]


def dump(job: Job) -> tuple[bytes, list[int]]:
    """Return the pickled job and the descriptors that the child must inherit; close them after.

    Raises what pickling raises for a source that cannot be passed on.
    """
    passing = _Passing()
    before: Any = context.get_spawning_popen()
    context.set_spawning_popen(passing)  # type: ignore[arg-type]
    try:
        return pickle.dumps(job, protocol=5), passing.fds
    except BaseException:
        for fd in passing.fds:
            os.close(fd)
        raise
    finally:
        context.set_spawning_popen(before)
