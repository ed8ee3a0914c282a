"""What the prefetch process is given when it starts, descriptors included."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from multiprocessing import context
from types import FunctionType
from typing import Any

from stoker.source.base import Source
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.tier import Pool


@dataclass(frozen=True)
class Job:
    """The samples to fetch and the cache to fill."""

    source: Source
    tier: MemoryTier | StackedTier
    """The cache; the process takes part in its memory, and its disk if there is one."""
    pool: Pool | None = None
    """Where samples are looked for before the source."""


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


_MAIN = ("__main__", "__mp_main__")
"""What a script is called: by itself, and in a process that multiprocessing spawned."""


class _Pickler(pickle.Pickler):
    """Refuses what is found by name in ``__main__``, a script or a notebook, however deep."""

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, type | FunctionType) and part.__module__ in _MAIN:
            raise pickle.PicklingError(f"{part.__qualname__} is defined in __main__")
        return NotImplemented


def dump(job: object) -> tuple[bytes, list[int]]:
    """Return the pickled job and the descriptors that the child must inherit; close them after.

    Raises what pickling raises for a source that cannot be passed on, also for one made of
    classes or functions of ``__main__``, which the child has not.
    """
    passing = _Passing()
    before: Any = context.get_spawning_popen()
    context.set_spawning_popen(passing)  # type: ignore[arg-type]
    try:
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=5).dump(job)
        return pickled.getvalue(), passing.fds
    except BaseException:
        for fd in passing.fds:
            os.close(fd)
        raise
    finally:
        context.set_spawning_popen(before)
