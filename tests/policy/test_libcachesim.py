"""Hit or miss of each access against libcachesim (development only: it is GPL)."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
from reference.textbook import TextbookS3FIFO

from policy.conftest import NewArena
from policy.traces import NUM_IDS, Access, play, trace
from stoker.policy import FIFO, LFU, LRU, S3FIFO, Policy, Sieve

pytestmark = pytest.mark.skipif(
    find_spec("libcachesim") is None,
    reason='libcachesim is not installed: pip install "stoker[dev]"',
)

POLICIES: dict[str, Policy] = {
    "LRU": LRU(),
    "LFU": LFU(),
    "FIFO": FIFO(),
    "Sieve": Sieve(),
    "S3FIFO": S3FIFO(),
}


def replay(name: str, capacity: int, accesses: list[Access]) -> list[bool]:
    """Return hit or miss of each access, as libcachesim sees it."""
    libcachesim: Any = importlib.import_module("libcachesim")
    cache = getattr(libcachesim, name)(capacity, hashpower=12)
    hits = []
    for time, (sample_id, size) in enumerate(accesses):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = sample_id, size, time
        hits.append(bool(cache.get(request)))
    return hits


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("capacity", [410, 600, 1000])
@pytest.mark.parametrize("name", POLICIES)
def test_every_access_agrees(new_arena: NewArena, name: str, capacity: int, unequal: bool) -> None:
    policy = POLICIES[name]
    for seed in range(2):
        accesses = trace(seed, 1500, unequal=unequal)
        arena = new_arena(policy, NUM_IDS, capacity)
        assert list(play(arena, policy, accesses)) == replay(name, capacity, accesses)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_the_textbook_s3fifo_is_right(unequal: bool) -> None:
    """The oracle of the other tests."""
    for seed in range(6):
        accesses = trace(seed, 1500, unequal=unequal)
        oracle = TextbookS3FIFO(600, 60, 540)
        assert [oracle.access(*a) for a in accesses] == replay("S3FIFO", 600, accesses)
