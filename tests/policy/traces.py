"""Random traces for the policy tests, and the read-through loop that plays them."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stoker.policy import Policy

NUM_IDS = 200


class Access(NamedTuple):
    sample_id: int
    size: int


def trace(seed: int, length: int, *, unequal: bool) -> list[Access]:
    """Zipf-like accesses, from nearly flat to steep; unequal sizes are 0 to 40 bytes."""
    rng = random.Random(seed)
    sizes = [rng.randint(0, 40) if unequal else 10 for _ in range(NUM_IDS)]
    steepness = rng.choice([0.2, 0.5, 0.9])
    weights = [1 / (rank + 1) ** steepness for rank in range(NUM_IDS)]
    return [Access(i, sizes[i]) for i in rng.choices(range(NUM_IDS), weights, k=length)]


def play(arena: Any, policy: Policy, accesses: list[Access]) -> Iterator[bool]:
    """Yield hit or miss for each access, putting what is missed."""
    entrance = policy.regions()[0].name
    for sample_id, size in accesses:
        ids = np.array([sample_id], dtype=np.uint32)
        found = bool(arena.get_many(ids)[2][0])
        if not found:
            arena.put_many(ids, [bytes(size)], region=entrance)
        yield found


def members(arena: Any) -> set[int]:
    """Return the ids cached now."""
    return set(np.flatnonzero(arena.contains(np.arange(NUM_IDS, dtype=np.uint32))).tolist())
