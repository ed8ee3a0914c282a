"""An arena in the state that benchmarks measure: turned over many times by mixed sizes.

A freshly filled cache flatters every allocator. Here each sample has one of two measured sizes or a
size drawn log-normally between 500 B and 400 KB, keys are random, so victims lie anywhere, and the
whole capacity is written ``turnovers`` times before anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import stoker

SMALL, LARGE = 3 * 1024, 110 * 1024
"""The two measured sizes in bytes: a CIFAR image as pixels, a typical ImageNet JPEG."""


@dataclass
class Churn:
    """An arena and a stream of samples whose bytes are slices of one large random buffer."""

    arena: stoker.Arena
    sizes: np.ndarray
    """i64[num_ids]: the size in bytes of every sample."""
    pool: np.ndarray
    """u8[pool_bytes]: where the bytes of every sample come from."""
    rng: np.random.Generator

    @classmethod
    def create(cls, capacity: int, turnovers: float, seed: int = 7) -> Churn:
        """Return an arena of ``capacity`` bytes after ``turnovers`` full turns of mixed sizes."""
        rng = np.random.default_rng(seed)
        sizes = _draw_sizes(rng, total=int(2.5 * capacity))
        pool = rng.integers(0, 256, min(256 << 20, 2 * capacity), dtype=np.uint8)
        arena = stoker.Arena(len(sizes), capacity, mean_size=int(sizes.mean()))
        churn = cls(arena, sizes, pool, rng)
        written, everyone = 0, np.arange(len(sizes), dtype=np.uint32)
        while written < turnovers * capacity:
            for ids in np.array_split(rng.permutation(everyone), max(1, len(everyone) // 256)):
                churn.put(ids)
                written += int(sizes[ids].sum())
                if written >= turnovers * capacity:
                    break
        return churn

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (u8[total], i64[n+1] offsets): bytes for ``ids``, gathered from the pool."""
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(self.sizes[ids], out=offsets[1:])
        start = int(self.rng.integers(0, max(1, len(self.pool) - int(offsets[-1]))))
        return self.pool[start : start + int(offsets[-1])], offsets

    def put(self, ids: np.ndarray) -> np.ndarray:
        """Insert ``ids`` with random keys; returns bool[n], True where it is cached now."""
        # A sample that is cached would only have its key refreshed.
        self.arena.discard(ids)
        return self.arena.put_many(ids, self.batch(ids), keys=self.rng.random(len(ids)))

    def cached(self, size: int) -> np.ndarray:
        """Return u32[n]: the cached ids whose samples have exactly ``size`` bytes."""
        ids = np.flatnonzero(self.sizes == size).astype(np.uint32)
        return ids[self.arena.contains(ids)]


def _draw_sizes(rng: np.random.Generator, total: int) -> np.ndarray:
    """Return sizes in random order: 40 % of the bytes small, 40 % large, 20 % mixed."""
    small = np.full(int(0.4 * total / SMALL), SMALL, np.int64)
    large = np.full(int(0.4 * total / LARGE), LARGE, np.int64)
    mixed = np.clip(rng.lognormal(np.log(20_000), 1.2, int(0.2 * total / 40_000)), 500, 400_000)
    return rng.permutation(np.concatenate([small, large, mixed.astype(np.int64)]))
