"""Seeded epochs through a real arena and a recipe's real policy, without storage or training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.plan import Plan
from stoker.recipes import Recipe
from stoker.source.memory import MemorySource
from stoker.store import MemoryTier, Store
from stoker.store.arena import Arena
from stoker.types import Outcome

_BATCH = 32  # small against the data set, else hits within a batch count as older than they are


@dataclass(frozen=True)
class Replayed:
    """Hits from the second epoch on."""

    hit_ratio: float
    """Hits / accesses."""
    byte_hit_ratio: float
    """Bytes served from the cache / all bytes served."""


def draw_sizes(num_samples: int, spread: float, seed: int) -> NDArray[np.int64]:
    """Return i64[num_samples], log-normal with mean 256 bytes; ``spread`` 0 makes them equal."""
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(np.log(256) - spread**2 / 2, spread, num_samples)
    return np.maximum(1, sizes).astype(np.int64)


def replay(
    recipe: Recipe, sizes: NDArray[np.int64], cache_bytes: int, epochs: int, seed: int
) -> Replayed:
    """Serve ``epochs`` epochs of samples with ``sizes`` i64[N] bytes; at least two epochs.

    The arena evicts by the recipe's rules exactly as in training, in one process.
    """
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    source = MemorySource((np.zeros(int(offsets[-1]), np.uint8), offsets))
    sampler = recipe.sampler(
        len(sizes), seed=seed, shuffle=True, pad_to=1, drop_last=False, epochs=epochs
    )
    arena = Arena(len(sizes), cache_bytes, mean_size=float(sizes.mean()), exact=True, seed=seed)
    arena.configure(recipe.policy.regions())
    accesses = hits = total_bytes = hit_bytes = 0
    with Store(source, MemoryTier(arena, recipe.policy.regions()[0].name)) as store:
        for epoch in range(epochs):
            plan = _with_next(sampler.plan(None, epoch), sampler.plan(None, epoch + 1))
            keys = recipe.policy.keys(plan.ids, None, plan, np.arange(len(plan)))
            for start in range(0, len(plan), _BATCH):
                part = slice(start, start + _BATCH)
                served = store.serve(plan.ids[part], None if keys is None else keys[part])
                if epoch == 0:
                    continue
                hit = served.outcomes == Outcome.HIT
                lengths = np.diff(served.offsets)
                accesses, hits = accesses + len(hit), hits + int(hit.sum())
                total_bytes += int(lengths.sum())
                hit_bytes += int(lengths[hit].sum())
    return Replayed(hits / accesses, hit_bytes / total_bytes)


def _with_next(plan: Plan, following: Plan) -> Plan:
    """Return ``plan``, which knows what follows it, as policies by next use need."""
    return Plan(plan.epoch, plan.start, plan.ids, plan.weights, following)
