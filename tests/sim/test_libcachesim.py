"""Hits of replays against libcachesim on the same traces (development only: it is GPL)."""

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from stoker.policy import Region
from stoker.policy.next_use import NextUse
from stoker.recipes import Recipe
from stoker.sim import replay

pytestmark = pytest.mark.skipif(
    find_spec("libcachesim") is None,
    reason='libcachesim is not installed: pip install "stoker[dev]"',
)

N, ROUNDS, NEVER = 600, 4, 2**62


class Admitting(NextUse):
    """Next use as libcachesim has it: every sample enters, while ours may refuse one."""

    def regions(self):
        return (Region("main", 1.0, order="key"),)


RECIPES: dict[str, str | Recipe] = {
    "LRU": "lru",
    "FIFO": "fifo",
    "LFU": "lfu",
    "Sieve": "sieve",
    "S3FIFO": "s3fifo",
    "Belady": Recipe("admitting", "", Admitting()),
}


def theirs(name: str, ids: list[int], capacity: int) -> int:
    libcachesim: Any = importlib.import_module("libcachesim")
    coming, seen = [NEVER] * len(ids), dict[int, int]()
    for at in range(len(ids) - 1, -1, -1):
        coming[at] = seen.get(ids[at], NEVER)
        seen[ids[at]] = at
    cache = getattr(libcachesim, name)(capacity, hashpower=12)
    hits = 0
    for at, sample in enumerate(ids):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = sample, 1, at
        request.next_access_vtime = coming[at]
        hits += bool(cache.get(request))
    return hits


@pytest.mark.parametrize("kind", ["shuffled", "zipf"])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("name", RECIPES)
def test_hits_are_equal(name, share, kind):
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, N + 1) ** 0.8
    trace = np.concatenate(
        [
            rng.permutation(N) if kind == "shuffled" else rng.choice(N, N, p=p / p.sum())
            for _ in range(ROUNDS)
        ]
    )
    # The whole trace as one epoch, since libcachesim's Belady knows all of it.
    sizes = np.ones(N, np.int64)
    ours = replay(RECIPES[name], N, 1, share, sizes=sizes, trace=[trace], batch_size=1)
    assert ours.per_epoch[0].hits == theirs(name, trace.tolist(), round(share * N))


def test_a_cache_that_may_refuse_hits_no_less():
    rng = np.random.default_rng(2)
    trace = [rng.integers(0, N, N * ROUNDS)]
    sizes = np.ones(N, np.int64)
    free, bound = (
        replay(recipe, N, 1, 0.2, sizes=sizes, trace=trace, batch_size=1).per_epoch[0].hits
        for recipe in ("belady", RECIPES["Belady"])
    )
    assert free >= bound
