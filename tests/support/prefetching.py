"""A rank whose samples are read ahead by real processes, and what it reads from and into."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.policy.base import Region
from stoker.prefetch import Prefetcher
from stoker.prefetch.prefetcher import Job
from stoker.prefetch.walk import Progress
from stoker.shared import SharedArray
from stoker.source.base import BaseSource
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from support.processes import processes_of
from support.waiting import await_true

NUM = 400
SAMPLES = [bytes([i % 251]) * (50 + i % 100) for i in range(NUM)]


def small_arena() -> Arena:
    """An arena for a third of the samples, with a window."""
    arena = Arena(NUM, 12_000, 100)
    arena.configure(
        [
            Region("main", 0.8, order="insertion", admission="while_room"),
            Region("window", 0.2, order="insertion"),
        ]
    )
    return arena


class Rank:
    """A rank that walks its plan and expects its samples to lie ready."""

    def __init__(
        self, arena: Arena, source: BaseSource, key: str = "key", fetchers: int = 1
    ) -> None:
        self.arena = arena
        self.fresh = SharedArray.create(NUM, np.uint8)
        self.read = SharedArray.create(3, np.float64)
        self.prefetcher = Prefetcher(
            key,
            lambda: Job(source, MemoryTier(arena), fetchers=fetchers),
            2_000,
            self.fresh,
            self.read,
        )
        self.progress = Progress(NUM)

    def publish(self, ids: np.ndarray, epoch: int = 0) -> None:
        self.epoch = epoch
        self.prefetcher.publish(epoch, ids, self.progress.begin(epoch))

    def serve(self, at: int) -> None:
        self.progress.finish(self.epoch, at, 1)

    def walk(self, ids: np.ndarray, patience: float = 10.0) -> int:
        """Serve all accesses in order; return how many never came."""
        missing = 0
        for at, sample in enumerate(ids.tolist()):
            if await_true(lambda: self.arena.contains([sample])[0], patience):  # noqa: B023
                assert self.arena.get(sample) == SAMPLES[sample]
            else:
                missing += 1
            self.serve(at)
        return missing


def processes(tmp: Path) -> list[int]:
    """The prefetch processes that use this test's runtime directory."""
    return processes_of("stoker.prefetch.process", tmp)


def order(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(NUM).astype(np.uint32)
