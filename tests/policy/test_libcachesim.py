"""Hit or miss of each access against libcachesim (development only: it is GPL)."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

from policy.conftest import NewArena
from policy.traces import NUM_IDS, Access, play, trace
from stoker.policy import FIFO, LFU, LRU, S3FIFO, Policy, Sieve
from stoker.testing.textbook import TextbookS3FIFO

pytestmark = pytest.mark.skipif(
    find_spec("libcachesim") is None,
    reason='libcachesim is not installed: pip install "stoker[dev]"',
)

POLICIES: dict[str, Policy] = {"LRU": LRU(), "LFU": LFU(), "FIFO": FIFO(), "Sieve": Sieve()}


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
    for seed in range(3):
        accesses = trace(seed, 1500, unequal=unequal)
        arena = new_arena(policy, NUM_IDS, capacity)
        assert list(play(arena, policy, accesses)) == replay(name, capacity, accesses)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("capacity", [410, 600, 1000])
def test_s3fifo_agrees_once_both_queues_are_filled_alike(
    new_arena: NewArena, capacity: int, unequal: bool
) -> None:
    """libcachesim fills main as well before its first eviction; here small takes everything.

    That is the one difference, so the loop below sends newcomers where libcachesim sends them
    until something is evicted.
    """
    for seed in range(3):
        accesses = trace(seed, 1500, unequal=unequal)
        arena = new_arena(S3FIFO(), NUM_IDS, capacity)
        hits = [serve_as_libcachesim(arena, access) for access in accesses]
        assert hits == replay("S3FIFO", capacity, accesses)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_the_textbook_s3fifo_is_right(unequal: bool) -> None:
    """The oracle of the other tests, with libcachesim's way of filling added."""
    for seed in range(6):
        accesses = trace(seed, 1500, unequal=unequal)
        oracle = TextbookS3FIFO(600, 60, 540, spill=True)
        assert [oracle.access(*a) for a in accesses] == replay("S3FIFO", 600, accesses)


def serve_as_libcachesim(arena: Any, access: Access) -> bool:
    found = bool(arena.get_many([access.sample_id])[2][0])
    if not found:
        stats = arena.stats()
        small = stats["regions"]["small"]
        room = stats["payload_bytes"] + access.size <= stats["capacity_bytes"]
        spills = room and not stats["evictions"] and small["bytes"] >= small["budget"]
        arena.put_many(
            [access.sample_id], [bytes(access.size)], region="main" if spills else "small"
        )
    return found
