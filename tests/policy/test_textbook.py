"""Each policy, access by access, against the textbook's own data structures."""

from collections.abc import Callable

import pytest
from reference import textbook
from reference.textbook import TextbookCache

from policy.conftest import NewArena
from policy.traces import NUM_IDS, members, play, trace
from stoker.policy import FIFO, LFU, LRU, S3FIFO, MinIO, Policy, Sieve

ORACLES: dict[str, tuple[Policy, Callable[[int], TextbookCache]]] = {
    "lru": (LRU(), textbook.TextbookLRU),
    "lfu": (LFU(), textbook.TextbookLFU),
    "fifo": (FIFO(), textbook.TextbookFIFO),
    "minio": (MinIO(), textbook.TextbookStatic),
    "sieve": (Sieve(), textbook.TextbookSieve),
    "s3fifo": (
        S3FIFO(),
        lambda capacity: textbook.TextbookS3FIFO(capacity, capacity // 10, capacity * 9 // 10),
    ),
}


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("capacity", [410, 600, 1000])
@pytest.mark.parametrize("name", ORACLES)
def test_every_access_agrees(new_arena: NewArena, name: str, capacity: int, unequal: bool) -> None:
    policy, oracle_of = ORACLES[name]
    for seed in range(2):
        accesses = trace(seed, 600, unequal=unequal)
        oracle = oracle_of(capacity)
        arena = new_arena(policy, NUM_IDS, capacity)
        for step, hit in enumerate(play(arena, policy, accesses)):
            assert hit == oracle.access(*accesses[step]), f"step {step} of seed {seed}"
            assert members(arena) == set(oracle.members), f"step {step} of seed {seed}"
        arena.verify()
        assert arena.stats()["payload_bytes"] == oracle.used


@pytest.mark.parametrize("name", ORACLES)
def test_a_sample_larger_than_the_cache_evicts_nothing(new_arena: NewArena, name: str) -> None:
    policy, _ = ORACLES[name]
    arena = new_arena(policy, NUM_IDS, 100)
    entrance = policy.regions()[0].name
    assert arena.put_many([1, 2], [b"1" * 8, b"2" * 9], region=entrance).all()
    assert not arena.put_many([3], [bytes(101)], region=entrance)[0]
    assert members(arena) == {1, 2}


def test_s3fifo_refuses_what_the_small_queue_cannot_hold(new_arena: NewArena) -> None:
    arena = new_arena(S3FIFO(), NUM_IDS, 100)
    assert arena.put_many([1], [bytes(10)], region="small")[0]
    assert not arena.put_many([2], [bytes(11)], region="small")[0]


def test_s3fifo_evicts_from_main_when_all_of_small_was_promoted(new_arena: NewArena) -> None:
    arena = new_arena(S3FIFO(small=0.2), NUM_IDS, 100)
    for i in range(10):
        arena.put_many([i], [bytes(10)], region="small")
    for _ in range(2):
        assert arena.get_many(range(10))[2].all()
    assert arena.put_many([20], [bytes(10)], region="small")[0]
    assert members(arena) == {*range(1, 10), 20}
