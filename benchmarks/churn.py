"""An arena in the state that benchmarks measure: turned over many times by mixed sizes.

A freshly filled cache flatters every allocator. Here half of the bytes are samples of a measured
size and half are of sizes drawn log-normally around it, victims lie anywhere in the cache, and its
whole capacity is written ``turnovers`` times before anything is timed. A harsher mixture, samples
of 3 KB and of 110 KB side by side, shows what happens to samples much larger than the mean.
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
    clock: int = 0
    """Bytes put so far."""

    @classmethod
    def create(
        cls, capacity: int, turnovers: float, size: int | None, extra: int = 0, seed: int = 7
    ) -> Churn:
        """Return an arena of ``capacity`` bytes after ``turnovers`` turns of mixed sizes.

        They lie around ``size``; None stands for the harsh mixture.

        With ``extra``, the last ids are samples of that size, three times the capacity in all,
        which the turns left out.
        """
        rng = np.random.default_rng(seed)
        mixed = _mixed_sizes(rng, int(2.5 * capacity), size)
        more = np.full(3 * capacity // extra if extra else 0, extra, np.int64)
        sizes = np.concatenate([mixed, more])
        pool = rng.integers(0, 256, min(256 << 20, 2 * capacity), dtype=np.uint8)
        arena = stoker.Arena(len(sizes), capacity, mean_size=int(mixed.mean()))
        churn = cls(arena, sizes, pool, rng)
        churn.turn_over(np.arange(len(mixed), dtype=np.uint32), turnovers)
        return churn

    def turn_over(self, ids: np.ndarray, times: float) -> None:
        """Insert samples of ``ids``, in one random order after the other, capacity x ``times``."""
        todo = int(times * self.arena.capacity_bytes)
        while todo > 0:
            for part in np.array_split(self.rng.permutation(ids), max(1, len(ids) // 64)):
                # One that is cached would only have its key refreshed.
                self.arena.discard(part)
                self.arena.put_many(part, self.batch(part), keys=self.keys(part))
                todo -= int(self.sizes[part].sum())
                if todo <= 0:
                    return

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (u8[total], i64[n+1] offsets): bytes for ``ids``, gathered from the pool."""
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(self.sizes[ids], out=offsets[1:])
        start = int(self.rng.integers(0, max(1, len(self.pool) - int(offsets[-1]))))
        return self.pool[start : start + int(offsets[-1])], offsets

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """Return f64[n]: older samples leave first, but not in the order of insertion.

        Keys without a trend would not do: the smallest leaves first, so that after a while only
        newcomers would be small enough to leave, and everything else would stay for good.
        """
        self.clock += int(self.sizes[ids].sum())
        return self.clock + self.rng.random(len(ids)) * self.arena.capacity_bytes / 2

    def cached(self, size: int) -> np.ndarray:
        """Return u32[n]: the cached ids whose samples have exactly ``size`` bytes."""
        ids = np.flatnonzero(self.sizes == size).astype(np.uint32)
        return ids[self.arena.contains(ids)]


def _mixed_sizes(rng: np.random.Generator, total: int, size: int | None) -> np.ndarray:
    """Return sizes in random order, ``total`` bytes in all.

    Half of the bytes are samples of ``size``, half are drawn around it; for None 40 % are small,
    40 % large, 20 % mixed.
    """
    if size is not None:
        same = np.full(int(0.5 * total / size), size, np.int64)
        around = rng.lognormal(np.log(size) - 0.18, 0.6, int(0.5 * total / size))
        around = np.clip(around, size / 20, size * 10).astype(np.int64)
        return rng.permutation(np.concatenate([same, around]))
    small = np.full(int(0.4 * total / SMALL), SMALL, np.int64)
    large = np.full(int(0.4 * total / LARGE), LARGE, np.int64)
    mixed = np.clip(rng.lognormal(np.log(20_000), 1.2, int(0.2 * total / 40_000)), 500, 400_000)
    return rng.permutation(np.concatenate([small, large, mixed.astype(np.int64)]))
