"""Memory over disk: what goes down, what comes up, and a disk that fails."""

import multiprocessing
import os
import pickle
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.doubles import CountingSource, check

from stoker.errors import SampleNotFound
from stoker.policy.base import Region
from stoker.policy.baselines import LRU, MinIO
from stoker.shared import SharedArray
from stoker.source.packed import Packed
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.store.store import Store
from stoker.store.tier import NOWHERE
from stoker.testing.tier_conformance import TierConformance, as_ids

NUM = 100
SIZE = 100
BY_KEY = (Region("main", 1.0, order="key", admission="beats_victims"),)


def stacked(path, num_ids, memory_bytes, disk_bytes, regions=None, **options):
    arenas = [Arena(num_ids, memory_bytes, 200), Arena(num_ids, disk_bytes, 200, path)]
    for arena in arenas:
        arena.configure(regions or LRU().regions())
    return StackedTier(*map(MemoryTier, arenas), **options)


class TestStacked(TierConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.path = tmp_path / "samples"

    def make(self, num_ids, capacity_bytes):
        return stacked(self.path, num_ids, capacity_bytes // 4, capacity_bytes * 3 // 4)


@pytest.fixture
def make(tmp_path):
    """Make tiers of 10 samples in memory and 30 on disk, closed at the end."""
    made = []

    def make(regions=None, disk_samples=30, **options):
        path = tmp_path / f"samples{len(made)}"
        made.append(stacked(path, NUM, 10 * SIZE, disk_samples * SIZE, regions, **options))
        return made[-1]

    yield make
    for tier in made:
        for arena in tier.arenas:
            arena.verify()
        tier.close()


def alike(ids):
    """Return samples of SIZE bytes each."""
    ids = np.asarray(ids)
    return Packed(np.repeat(ids.astype(np.uint8), SIZE), np.arange(len(ids) + 1) * SIZE)


def put(tier, ids, keys=None):
    """Put one after the other, since the samples of a batch do not evict each other."""
    each = [
        tier.put_many(as_ids([i]), alike([i]), None if keys is None else keys[k : k + 1])
        for k, i in enumerate(ids)
    ]
    return np.concatenate(each)


def get(tier, ids, keys=None):
    ids = list(ids)
    packed, found = tier.get_many(as_ids(ids), keys)
    assert packed.data.tobytes() == alike(np.array(ids)[found]).data.tobytes()
    return found


def where(tier):
    """Return the ids in memory and those on disk."""
    ids = np.arange(NUM, dtype=np.uint32)
    return tuple(set(ids[arena.contains(ids)].tolist()) for arena in tier.arenas)


def test_victims_go_down_and_hits_come_up(make):
    tier = make()
    assert put(tier, range(25)).all()
    assert where(tier) == (set(range(15, 25)), set(range(15)))
    assert get(tier, [3, 20, 3, 99]).tolist() == [True, True, True, False]
    assert where(tier) == ({3, *range(16, 25)}, {*range(16)} - {3})
    stats = tier.stats()
    assert (stats["disk_hits"], stats["disk_bytes"], stats["disk_errors"]) == (2, 2 * SIZE, 0)
    assert stats["entries"] == 25
    assert stats["disk"]["entries"] == stats["memory"]["entries"] + 5


def test_together_they_hold_what_each_holds(make):
    for regions in (MinIO().regions(), LRU().regions(), BY_KEY):
        tier = make(regions)
        keys = np.arange(NUM, dtype=float) if regions is BY_KEY else None
        for begin in range(0, NUM, 7):
            ids = range(begin, min(begin + 7, NUM))
            put(tier, ids, None if keys is None else keys[list(ids)])
            memory, disk = where(tier)
            assert not memory & disk
        assert (len(memory), len(disk)) == (10, 30)
        if regions is BY_KEY:
            assert (memory, disk) == (set(range(90, 100)), set(range(60, 90)))


def test_keys_follow(make):
    tier = make(BY_KEY)
    put(tier, range(12), np.arange(12.0))
    memory, disk = tier.arenas
    assert disk.keys(as_ids([0, 1])).tolist() == [0, 1]
    assert memory.keys(as_ids([2]))[0] == 2
    assert get(tier, [0], np.array([50.0])).all()  # worth it now
    assert memory.keys(as_ids([0]))[0] == 50
    assert disk.keys(as_ids([2]))[0] == 2
    assert get(tier, [1], np.array([-5.0])).all()  # not worth it
    assert disk.keys(as_ids([1]))[0] == -5


def test_what_memory_refuses_goes_to_disk(make):
    tier = make(MinIO().regions())
    assert put(tier, range(40)).all()
    assert where(tier) == (set(range(10)), set(range(10, 40)))
    assert not put(tier, [50]).any()
    assert get(tier, range(40)).all()
    assert where(tier) == (set(range(10)), set(range(10, 40)))


def test_a_disk_with_room_for_all_keeps_all(make):
    tier = make(disk_samples=NUM, keeps_all=True)
    for begin in range(0, NUM, 20):
        assert put(tier, range(begin, begin + 20)).all()
    assert where(tier) == (set(range(90, 100)), set(range(NUM)))
    assert get(tier, range(NUM)).all()
    assert len(where(tier)[1]) == NUM


def test_a_disk_that_is_lent_complements_memory_until_it_is_back(make):
    """It had the samples that memory had."""
    tier = make(disk_samples=NUM, keeps_all=True)
    tier.disk.arena.limit(30 * SIZE)
    assert not tier.keeps_all
    put(tier, range(NUM))
    memory, disk = where(tier)
    assert (len(memory), len(disk), memory & disk) == (10, 30, set())
    assert get(tier, memory | disk).all()
    tier.disk.arena.limit(NUM * SIZE)
    assert tier.keeps_all
    put(tier, range(NUM))
    assert len(where(tier)[1]) == NUM
    assert get(tier, range(NUM)).all()


@pytest.mark.parametrize("keeps_all", [False, True])
def test_what_belongs_nowhere_is_kept_neither_above_nor_below(make, keeps_all):
    tier = make(disk_samples=NUM, keeps_all=keeps_all)
    places = SharedArray.create(NUM, np.uint8)
    places.array[10:] = NOWHERE
    tier.place_by(places)
    ids = as_ids([3, 12, 5, 40])
    kept = tier.put_many(ids, alike(ids))
    assert kept.tolist() == [True, False, True, False]
    assert not tier.put_many(ids[[1, 3]], alike(ids[[1, 3]])).any()
    for arena in tier.arenas:
        assert not arena.contains(ids[[1, 3]]).any()


@pytest.mark.parametrize("keeps_all", [False, True])
def test_what_memory_would_not_keep_waits_in_its_window(make, keeps_all):
    regions = (
        Region("main", 0.5, order="insertion", admission="while_room"),
        Region("window", 0.5, order="insertion"),
    )
    tier = make(regions, keeps_all=keeps_all, disk_samples=60)
    tier.put_many(as_ids(range(8)), alike(range(8)), None, "window")
    memory, disk = where(tier)
    assert memory == set(range(8))
    assert disk >= {5, 6, 7}
    tier.arena.discard_from("window", as_ids(range(8)))
    assert tier.rise(as_ids([4, 6, 50]), None, "window").tolist() == [keeps_all, True, False]
    assert 6 in where(tier)[0]
    assert get(tier, range(8)).all()


def test_one_reader_each_whatever_memory_refuses(make):
    source = CountingSource(NUM)
    tier = make(MinIO().regions(), disk_samples=90)
    store = Store(source, tier)
    order = [np.random.default_rng(s).permutation(NUM) for s in (0, 0, 1, 2)]

    def walk(ids):
        for begin in range(0, NUM, 5):
            check(store.serve(ids[begin : begin + 5]), ids[begin : begin + 5])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(walk, order))
    read = [i for batch in source.reads for i in batch]
    assert sorted(read) == list(range(NUM))


def test_claims_end_where_the_sample_went(make):
    tier = make(MinIO().regions())
    put(tier, range(9))
    assert tier.claim(as_ids([8, 9, 10])).tolist() == [False, True, True]
    assert not tier.wait(as_ids([9, 10]), 0.01).any()
    put(tier, [9, 10])
    assert 10 in where(tier)[1]
    assert tier.wait(as_ids([8, 9, 10]), 10).all()
    assert not tier.claim(as_ids([8, 9, 10])).any()


def test_a_failed_read_gives_its_claim_back(make):
    tier = make()
    served = Store(CountingSource(NUM, bad=[3]), tier).serve([2, 3])
    assert isinstance(served.errors[1], SampleNotFound)
    assert tier.claim(as_ids([2, 3])).tolist() == [False, True]


def test_a_spoilt_sample_is_a_miss(make, tmp_path):
    tier = make(disk_samples=NUM, keeps_all=True)
    put(tier, range(50))
    path = tmp_path / "samples0"
    data = bytearray(path.read_bytes())
    begin = data.index(bytes([5]) * SIZE)
    data[begin + 50] ^= 1
    path.write_bytes(data)
    assert get(tier, [4, 5, 6]).tolist() == [True, False, True]
    assert tier.stats()["disk"]["corrupt"] == 1
    assert put(tier, [5]).all()
    assert get(tier, [5]).all()


def test_a_disk_that_is_cut_short(make, tmp_path):
    tier = make(disk_samples=NUM, keeps_all=True)
    put(tier, range(50))
    os.truncate(tmp_path / "samples0", 5000)
    with pytest.warns(RuntimeWarning, match="disk cache fails, and the cache in memory continues"):
        assert get(tier, range(50)).sum() == 10
    assert tier.stats()["disk_errors"] == 1
    assert tier.stats()["disk"]["io_errors"] == 40


def test_a_disk_that_takes_no_more(make):
    tier = make(MinIO().regions())
    put(tier, range(10))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 64, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="disk cache fails"):
            assert not put(tier, range(20, 23)).any()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert not put(tier, range(23, 26)).any()
        assert get(tier, range(10)).all()
        assert tier.claim(as_ids([20])).all()
        tier.abandon(as_ids([20]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert put(tier, range(20, 23)).all()
    assert tier.stats()["disk_errors"] == 6


def test_a_disk_that_is_gone_altogether(make, monkeypatch):
    tier = make(MinIO().regions())
    source = CountingSource(NUM)
    store = Store(source, tier)
    check(store.serve(range(NUM)), range(NUM))
    closed = Arena(NUM, 100, 10)
    closed.close()
    monkeypatch.setattr(tier.disk, "arena", closed)
    with pytest.warns(RuntimeWarning, match="disk cache fails") as caught:
        check(store.serve(range(NUM)), range(NUM))
    assert len(caught) == 1
    lost = np.flatnonzero(~tier.arena.contains(range(NUM))).tolist()
    assert 0 < len(lost) < NUM
    assert source.reads[1] == lost
    assert store.stats()["tier"]["entries"] == NUM - len(lost)
    assert store.stats()["tier"]["disk_errors"] > 0


def use_it(tier, pipe):
    with pytest.raises(TypeError, match="only for a child process"):
        pickle.dumps(tier)
    pipe.send((get(tier, [3, 24]).all(), put(tier, [60]).all()))
    tier.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_share_it(make, method):
    tier = make()
    put(tier, range(25))
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=use_it, args=(tier, there))
    child.start()
    assert here.recv() == (True, True)
    child.join()
    assert get(tier, [60, 3]).all()
    assert tier.stats()["disk_hits"] == 1


def test_another_membership_has_leases_and_claims_of_its_own(make):
    tier = make()
    put(tier, range(25))
    again = tier.attached()
    again.arena.lease(as_ids([20]), 5)
    assert get(again, [3]).all()
    put(tier, range(40, 60))
    assert 20 in where(tier)[0]
    again.close()
    put(tier, range(60, 80))
    assert 20 not in where(tier)[0]
    assert tier.stats()["disk_hits"] == 1
