"""The handle on the prefetch process in a rank, and what that process is given when it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.node.bandwidth import FetchShare
from stoker.node.hosting import has_service
from stoker.node.messages import Channel
from stoker.node.supervisor import Forerunner, Supervisor
from stoker.prefetch.walk import Marks
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.substitutes import StandIns
from stoker.store.tier import Pool

log = logging.getLogger("stoker.prefetch")
_MOST_FETCHERS = 8


@dataclass(frozen=True)
class Job:
    """The samples to fetch and the cache to fill."""

    source: Source
    tier: MemoryTier | StackedTier
    """The cache; the process takes part in its memory, and its disk if there is one."""
    pool: Pool | None = None
    """Where samples are looked for before the source."""
    fetchers: int = 0
    """Processes that read; 0: as many as make it faster."""


def most_fetchers(source: Source, has_pool: bool) -> int:
    """Return how many processes may be of use: reading sample by sample is one interpreter's work.

    Half the cores at most, and eight: the workers decode on the others.
    """
    if has_pool or not source.lanes:
        return 1
    return max(1, min(_MOST_FETCHERS, len(os.sched_getaffinity(0)) // 2))


def forerunner() -> Forerunner | None:
    """Return a prefetch process on its way, for a Prefetcher; None where it is not ours to start.

    Or where it cannot be started.
    """
    try:
        return None if has_service() else Forerunner("stoker.prefetch.process")
    except (OSError, StokerError) as error:
        log.info("the prefetch process starts later: %s", error)
        return None


class _Published(NamedTuple):
    """One epoch, as it is told to the process, and told again to one that replaces it."""

    epoch: int
    ids: SharedArray
    marks: SharedArray
    generation: int
    keys: SharedArray | None
    blocks: SharedArray | None
    before: SharedArray | None


class Prefetcher:
    """Keeps the prefetch process of this node walking ahead of one rank.

    ``key`` names the arena: all ranks and jobs of this user that share it share the process too.
    ``job`` is what the process needs if it has to be started, ``window_bytes`` how much may lie
    ready for this rank, and ``fresh`` (``u8[N]``) gets 1 at samples that were read for an access
    still to come; ``read`` (``f64[3]``) counts these as a :class:`~stoker.store.flight.Meter`
    does. What a key sample in ``region`` stands for, as ``stand_ins`` has it, is not read as long
    as it does. Reads wait for ``fetch_share``, as those of the rank's workers do; samples go to the
    region ``entrance``, if one is named. A ``forerunner`` may have begun to come up already. What
    becomes of a process that dies, hangs, or cannot be started says
    :class:`~stoker.node.supervisor.Supervisor`.

    Used by one thread; another one, its own, watches. In a forked child it does nothing.
    """

    def __init__(
        self,
        key: str,
        job: Callable[[], Job],
        window_bytes: int,
        fresh: SharedArray,
        read: SharedArray,
        stand_ins: StandIns | None = None,
        region: str = "",
        fetch_share: FetchShare | None = None,
        entrance: str = "",
        forerunner: Forerunner | None = None,
    ) -> None:
        self._window_bytes = window_bytes
        self._shared = [fresh, read, *(stand_ins or ())]
        self._region = region
        self._entrance = entrance
        self._fetch_share = fetch_share or FetchShare(0)
        self._segments: list[_Published] = []
        self._supervisor = Supervisor(
            "prefetch",
            "stoker.prefetch.process",
            key,
            job,
            self._introduce,
            lost=self._lost,
            forerunner=forerunner,
        )

    def publish(
        self,
        epoch: int,
        ids: NDArray[np.uint32],
        marks: SharedArray,
        keys: NDArray[np.float64] | None = None,
        blocks: NDArray[np.uint32] | None = None,
        before: NDArray[np.float64] | None = None,
    ) -> None:
        """Append an epoch's accesses ``u32[A]``; ``marks`` is the memory of its :class:`Marks`.

        ``keys`` (``f64[A]``) are those of samples after their access. Accesses of one of the
        ``blocks`` (``u32[A]``) are read at once, and kept by the keys ``before`` (``f64[A]``).
        """
        segment = _Published(
            epoch,
            SharedArray.copy_of(np.ascontiguousarray(ids, np.uint32)),
            marks,
            Marks(marks.array).generation,
            *(
                None if given is None else SharedArray.copy_of(np.ascontiguousarray(given, dtype))
                for given, dtype in ((keys, np.float64), (blocks, np.uint32), (before, np.float64))
            ),
        )
        with self._supervisor.mutex:
            self._segments = [*self._segments[-1:], segment]
            self._supervisor.tell(*self._order(segment))

    def write_keys(self, epoch: int, first: int, keys: NDArray[np.float64]) -> None:
        """Change the keys of accesses from ``first`` on; those read already keep theirs."""
        for segment in self._segments:
            if segment.epoch == epoch and segment.keys is not None:
                # The process reads the same memory.
                segment.keys.array[first : first + len(keys)] = keys

    def reset(self) -> None:
        """Forget what was published: the rank goes elsewhere."""
        with self._supervisor.mutex:
            self._segments = []
            self._supervisor.tell({"order": "reset"})

    def close(self) -> None:
        """Disconnect; the process ends when no other process needs it. May be called again."""
        self._supervisor.close()

    def _introduce(self, channel: Channel) -> None:
        share = self._fetch_share
        order = {
            "order": "join",
            "window_bytes": self._window_bytes,
            "region": self._region,
            "entrance": self._entrance,
            "fetch_share": [share.token, share.weight],
        }
        channel.send(order, [array.fileno() for array in self._shared])
        for segment in self._segments:
            channel.send(*self._order(segment))

    def _lost(self) -> None:
        """Let workers read for themselves at once."""
        for segment in self._segments:
            Marks(segment.marks.array).attend(0.0)

    @staticmethod
    def _order(segment: _Published) -> tuple[dict[str, Any], list[int]]:
        optional = {name: getattr(segment, name) for name in ("keys", "blocks", "before")}
        given = {name: array for name, array in optional.items() if array is not None}
        fds = [each.fileno() for each in (segment.ids, segment.marks, *given.values())]
        order = {
            "order": "segment",
            "epoch": segment.epoch,
            "length": len(segment.ids.array),
            "generation": segment.generation,
            "given": list(given),
        }
        return order, fds
