import multiprocessing

import numpy as np
import pytest

from stoker.policy.base import Region
from stoker.policy.lru import LRU
from stoker.store.arena import Arena
from stoker.store.memory import MemoryTier
from stoker.testing.reference_arena import ReferenceArena
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids
from store.doubles import lru_tier


def native_tier(num_ids, capacity_bytes):
    arena = Arena(num_ids, capacity_bytes, 200)
    arena.configure(LRU().regions())
    return MemoryTier(arena)


class TestOverTheReference(TierConformance):
    def make(self, num_ids, capacity_bytes):
        return lru_tier(num_ids, capacity_bytes)


class TestOverTheNativeArena(TierConformance):
    def make(self, num_ids, capacity_bytes):
        return native_tier(num_ids, capacity_bytes)


def test_keys_are_set_at_each_access():
    arena = ReferenceArena(100, 10_000)
    tier = MemoryTier(arena)
    tier.put_many(as_ids([1, 2]), pack_ids([1, 2]), np.array([50.0, 51.0]))
    assert arena.keys([1, 2]).tolist() == [50, 51]
    tier.get_many(as_ids([9, 2]), np.array([70.0, 71.0]))
    assert arena.keys([1, 2]).tolist() == [50, 71]


@pytest.mark.parametrize("num_bytes", [3, 22_500, 8_000_000, 10**8 + 7])
@pytest.mark.parametrize("window", [1, 12_345, 26_843_545])
def test_a_region_for_all_samples_is_not_a_byte_short(num_bytes, window):
    total = num_bytes + window
    with Arena(4, total, total / 2) as arena:
        arena.configure([Region("main", num_bytes / total), Region("window", window / total)])
        budgets = {name: each["budget"] for name, each in arena.stats()["regions"].items()}
    assert budgets == {"main": num_bytes, "window": window}


def put_one(tier):
    tier.put_many(as_ids([5]), pack_ids([5]))
    tier.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_share_the_memory(method):
    tier = native_tier(100, 10_000)
    child = multiprocessing.get_context(method).Process(target=put_one, args=(tier,))
    child.start()
    child.join()
    assert child.exitcode == 0
    packed, found = tier.get_many(as_ids([5]))
    assert found.all()
    assert packed.data.tobytes() == pack_ids([5]).data.tobytes()
    tier.arena.verify()
    tier.close()


def test_closing_releases_by_the_owners_way():
    released = []
    arena = ReferenceArena(100, 10_000)
    MemoryTier(arena, release=lambda: released.append(1)).close()
    assert released == [1]
