import multiprocessing

import numpy as np
import pytest
from reference.arena import ReferenceArena
from support.doubles import lru_tier

from stoker.policy.base import Region
from stoker.policy.baselines import LRU
from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier, drop_strays
from stoker.store.tier import NOWHERE
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids


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


TWO = (Region("high", 0.6, admission="beats_victims"), Region("low", 0.4, order="insertion"))


@pytest.fixture
def two():
    """A tier of two regions whose samples go by their place, and the places."""
    places = SharedArray.create(100, np.uint8)
    places.array[50:] = 1
    arena = Arena(100, 10_000, 100)
    arena.configure(TWO)
    tier = MemoryTier(arena, "high")
    tier.place_by(places)
    yield tier, places.array
    arena.verify()
    tier.close()


def test_new_samples_go_to_their_place(two):
    tier, places = two
    ids = as_ids([60, 1, 61, 2])
    assert tier.put_many(ids, pack_ids(ids.tolist()), np.arange(4.0)).all()
    assert [tier.list(r).tolist() for r in ("high", "low")] == [[1, 2], [60, 61]]
    assert tier.arena.keys([1, 2]).tolist() == [1, 3]
    places[3] = 1  # at once, for all who share the places
    tier.put_many(as_ids([3]), pack_ids([3]))
    assert (tier.copies(as_ids([1, 3, 9]), "low") > 0).tolist() == [False, True, False]
    assert tier.get_many(ids)[0].data.tobytes() == pack_ids(ids.tolist()).data.tobytes()


def test_what_belongs_nowhere_is_not_kept_but_may_wait_for_its_access(two):
    tier, places = two
    places[[3, 61]] = NOWHERE
    ids = as_ids([2, 3, 60, 61])
    kept = tier.put_many(ids, pack_ids(ids.tolist()), np.arange(4.0))
    assert kept.tolist() == [True, False, True, False]
    assert [tier.list(r).tolist() for r in ("high", "low")] == [[2], [60]]
    assert not tier.put_many(as_ids([3, 61]), pack_ids([3, 61])).any()
    kept = tier.put_many(ids, pack_ids(ids.tolist()), np.arange(4.0), "low")  # as a window
    assert kept.all() and tier.list("low").tolist() == [3, 60, 61]
    assert tier.get_many(ids)[0].data.tobytes() == pack_ids(ids.tolist()).data.tobytes()


def test_what_belongs_nowhere_any_more_leaves(two):
    tier, places = two
    ids = as_ids([1, 2, 3, 60, 61])
    tier.put_many(ids, pack_ids(ids.tolist()))
    places[[2, 60]] = NOWHERE
    drop_strays(tier.arena, (*TWO, Region("of another job", 0.1)), places)
    assert [tier.list(r).tolist() for r in ("high", "low")] == [[1, 3], [61]]


def test_places_are_names_so_another_jobs_regions_do_no_harm(two):
    tier, _ = two
    mine = MemoryTier(tier.arena, "high", regions=("high", "static", "low"), overflow="transit")
    places = SharedArray.create(100, np.uint8)
    places.array[:3] = 0, 1, 2
    mine.place_by(places)
    assert mine.put_many(as_ids([0, 1, 2]), pack_ids([0, 1, 2])).all()
    assert [tier.list(r).tolist() for r in ("high", "low")] == [[0, 1], [2]]


def test_what_a_region_refuses_goes_to_the_overflow():
    with Arena(100, 1_000, 100) as arena:
        arena.configure([TWO[0], Region("transit", 0.4, order="insertion")])
        tier = MemoryTier(arena, "high", overflow="transit")
        for first in range(0, 12, 4):
            ids = as_ids(range(first, first + 4))
            assert tier.put_many(ids, pack(ids, 100), -ids.astype(float)).all()
        assert tier.list("high").tolist() == [0, 1, 2, 3, 4, 5]
        assert tier.list("transit").tolist() == [8, 9, 10, 11]
        assert tier.move(as_ids([11]), "high", np.array([5.0])).all()
        assert tier.list("high").tolist() == [0, 1, 2, 3, 4, 11]
        arena.verify()


def test_what_was_read_ahead_passes_through_the_overflow_too():
    with Arena(100, 1_000, 100) as arena:
        regions = [TWO[0], *(Region(n, 0.2, order="insertion") for n in ("transit", "window"))]
        arena.configure(regions)
        tier = MemoryTier(arena, "high", overflow="transit")
        tier.put_many(as_ids(range(6)), pack(range(6), 100), np.ones(6))
        tier.put_many(as_ids([7, 8]), pack([7, 8], 100), np.zeros(2), "window")
        assert tier.list("window").tolist() == [7, 8]
        tier.drop_from("window", as_ids([0, 7, 9]))
        assert [tier.list(r).tolist() for r in ("transit", "window")] == [[7], [8]]
        assert len(tier.list("high")) == 6
        plain = MemoryTier(arena, "high")
        plain.drop_from("window", as_ids([8]))
        assert not arena.contains([8]).any()
        arena.verify()


def test_shares_move_the_budgets(two):
    tier, _ = two
    tier.put_many(as_ids(range(60, 90)), pack(range(60, 90), 130))
    tier.resize({"high": 3.0, "low": 1.0})
    regions = tier.stats()["regions"]
    assert [regions[r]["budget"] for r in ("high", "low")] == [7_500, 2_500]
    assert len(tier.list("low")) == 19
    tier.attached().close()


def pack(ids, length):
    data = np.repeat(np.asarray(ids, np.uint8), length)
    return Packed(data, np.arange(len(ids) + 1, dtype=np.int64) * length)


@pytest.mark.parametrize("size", [500, 1_030, 2_100, 3_100, 33_000])
def test_all_samples_fit_where_there_is_room_for_their_bytes(size):
    num = 2_000
    with Arena(num, num * size, size) as arena:
        arena.configure([Region("main", 1.0, order="insertion", admission="while_room")])
        for begin in range(0, num, 250):
            ids = np.arange(begin, begin + 250, dtype=np.uint32)
            samples = np.zeros(250 * size, np.uint8), np.arange(251) * size
            assert arena.put_many(ids, samples).all()


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
