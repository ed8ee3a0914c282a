import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
from support.doubles import BrokenTier, CountingSource, check, lru_tier, sample_of
from support.waiting import until

from stoker.errors import ConfigError, SampleNotFound, SegmentError, SourceUnavailable
from stoker.store.store import Store
from stoker.store.tier import NullTier
from stoker.types import Outcome
from store.test_memory_tier import native_tier

HIT, FETCHED = Outcome.HIT, Outcome.FETCHED


@pytest.fixture
def store():
    with Store(CountingSource(), lru_tier()) as store:
        yield store


def test_first_accesses_are_fetched_in_one_read_and_later_ones_hit(store):
    ids = [7, 3, 900, 11]
    first = store.serve(ids)
    check(first, ids)
    assert first.outcomes.tolist() == [FETCHED] * 4
    assert store.source.reads == [[7, 3, 900, 11]]
    again = store.serve(np.array(ids[::-1], np.uint32))
    check(again, ids[::-1])
    assert again.outcomes.tolist() == [HIT] * 4
    assert len(store.source.reads) == 1
    stats = store.stats()
    assert (stats["accesses"], stats["hits"], stats["fetched"]) == (8, 4, 4)
    size = sum(len(sample_of(i)) for i in ids)
    assert (stats["bytes_from_source"], stats["bytes_from_cache"]) == (size, size)
    assert stats["tier"]["entries"] == 4


def test_hits_and_misses_are_laid_out_as_asked(store):
    store.serve([1, 3, 5])
    ids = [4, 1, 2, 3, 3, 9, 5]
    served = store.serve(ids)
    check(served, ids)
    assert served.outcomes.tolist() == [FETCHED, HIT, FETCHED, HIT, HIT, FETCHED, HIT]


def test_a_repeated_id_is_read_once_and_its_repeats_hit(store):
    ids = [8, 2, 8, 8, 2]
    served = store.serve(ids)
    check(served, ids)
    assert served.outcomes.tolist() == [FETCHED, FETCHED, HIT, HIT, HIT]
    assert store.source.reads == [[8, 2]]
    assert store.stats()["bytes_from_source"] == len(sample_of(2) + sample_of(8))


def test_how_long_a_read_takes_is_remembered_and_hits_do_not_change_it(store):
    assert store.read_seconds == 0
    store.serve([1, 2])
    known = store.read_seconds
    assert known > 0
    store.serve([2, 1])
    assert store.read_seconds == known


def test_an_empty_batch_is_served(store):
    served = store.serve([])
    assert len(served) == 0
    assert served.offsets.tolist() == [0]


def test_any_mix_over_many_evictions_is_right(store):
    random = np.random.default_rng(0)
    for _ in range(100):
        ids = random.integers(0, 1000, random.integers(1, 80)).tolist()
        check(store.serve(ids), ids)
    stats = store.stats()
    assert stats["accesses"] == stats["hits"] + stats["fetched"]
    assert stats["fetched"] == sum(map(len, store.source.reads))


@pytest.mark.parametrize("bad", [[-1], [1000], [2**32 + 1], [[1, 2]], [1.5], 3])
def test_bad_ids_are_refused(store, bad):
    with pytest.raises(ConfigError):
        store.serve(bad)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="0 samples"):
        Store(CountingSource(0), NullTier())
    with pytest.raises(ConfigError, match="is not a time"):
        Store(CountingSource(), NullTier(), wait_seconds=-1)


def test_a_closed_store_says_so():
    store = Store(CountingSource(), lru_tier())
    store.serve([1])
    store.close()
    store.close()
    with pytest.raises(SegmentError, match="closed"):
        store.serve([1])
    assert store.stats()["fetched"] == 1


def test_a_sample_that_cannot_be_read_costs_only_itself():
    store = Store(CountingSource(bad=[5]), lru_tier())
    ids = [4, 5, 6, 5]
    served = store.serve(ids)
    check(served, ids)
    assert sorted(served.errors) == [1, 3]
    assert isinstance(served.errors[1], SampleNotFound)
    assert len(served[1]) == 0
    stats = store.stats()
    assert (stats["accesses"], stats["fetched"], stats["failed"]) == (2, 2, 2)
    store.source.bad.clear()
    assert store.serve([5, 4]).outcomes.tolist() == [FETCHED, HIT]


def test_a_source_that_is_down_is_an_error_per_sample():
    class Down(CountingSource):
        def read_packed(self, ids):
            raise SourceUnavailable("down")

    store = Store(Down(), lru_tier())
    assert sorted(store.serve([1, 2]).errors) == [0, 1]
    assert store._tier.claim(np.array([1, 2], np.uint32)).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_claims_are_given_back_whatever_the_source_raises(error):
    class Interrupted(CountingSource):
        def read_packed(self, ids):
            raise error

    store = Store(Interrupted(), lru_tier())
    with pytest.raises(error):
        store.serve([1, 2])
    assert store.tier.claim(np.array([1, 2], np.uint32)).all()


@pytest.mark.parametrize("method", ["get_many", "claim", "put_many", "wait", "abandon"])
def test_a_failing_tier_costs_reads_and_one_warning(method):
    store = Store(CountingSource(), BrokenTier(method))
    if method == "wait":
        store.tier.claim = lambda ids: np.zeros(len(ids), bool)
    with pytest.warns(RuntimeWarning, match="bypassed") as caught:
        for _ in range(3):
            check(store.serve([1, 2, 2]), [1, 2, 2])
    assert len(caught) == 1
    stats = store.stats()
    assert (stats["fetched"], stats["bypassed"]) == (6, 3)


def test_what_another_is_fetching_is_waited_for_and_own_work_comes_first(store):
    store.source.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.serve, [1, 2])
        until(lambda: store.source.reads)
        second = pool.submit(store.serve, [2, 3])
        until(lambda: len(store.source.reads) == 2)
        store.source.gate.set()
        check(first.result(), [1, 2])
        check(second.result(), [2, 3])
    assert store.source.reads == [[1, 2], [3]]
    assert second.result().outcomes.tolist() == [HIT, FETCHED]
    assert store.stats()["wait_seconds"] >= 0


def test_waiting_for_a_claimant_that_stalls_is_bounded():
    store = Store(CountingSource(), lru_tier(), wait_seconds=0.3)
    store.tier.claim(np.array([2], np.uint32))
    begin = time.monotonic()
    served = store.serve([1, 2])
    assert 0.25 < time.monotonic() - begin < 5
    check(served, [1, 2])
    assert served.outcomes.tolist() == [FETCHED, FETCHED]
    assert 0.25 < store.stats()["wait_seconds"] < 5
    assert not store.tier.claim(np.array([2], np.uint32)).any(), "the stalled claim was touched"


def test_what_a_claimant_gives_up_is_fetched_and_kept(store):
    store.tier.claim(np.array([2], np.uint32))
    timer = threading.Timer(0.1, store.tier.abandon, [np.array([2], np.uint32)])
    timer.start()
    check(store.serve([2]), [2])
    timer.join()
    assert store.serve([2]).outcomes.tolist() == [HIT]


def test_what_was_read_ahead_counts_as_fetched_at_its_access_and_not_at_another(store):
    fresh = store.expect_prefetch()[0].array
    store.serve([1])
    fresh[[1, 2]] = 1  # 1 for its next access; 2 is read here before the prefetched copy comes
    assert store.serve([1, 2]).outcomes.tolist() == [FETCHED, FETCHED]
    assert fresh[[1, 2]].tolist() == [0, 1]
    assert store.serve([1, 2, 2]).outcomes.tolist() == [HIT, FETCHED, HIT]
    assert store.serve([1, 2]).outcomes.tolist() == [HIT, HIT]


def test_a_batch_on_its_way_is_copied_once(store, monkeypatch):
    wanted, copies = np.array([1, 2], np.uint32), []
    get_many = type(store.tier).get_many

    def counted(tier, *arguments):
        copies.append(get_many(tier, *arguments))
        return copies[-1]

    monkeypatch.setattr(type(store.tier), "get_many", counted)
    store.expect_prefetch()
    store.serve([1])
    store.tier.claim(wanted[1:])
    copies.clear()
    timer = threading.Timer(0.1, store.tier.put_many, [wanted[1:], [sample_of(2)]])
    timer.start()
    served = store.serve(wanted)
    timer.join()
    check(served, [1, 2])
    assert served.outcomes.tolist() == [HIT, HIT]
    assert len(copies) == 1
    assert served.data is copies[0][0].data
    assert store.stats()["wait_seconds"] > 0


def test_a_batch_of_which_nobody_brings_a_part_is_not_waited_for(store):
    store.expect_prefetch()
    store.tier.claim(np.array([2], np.uint32))
    threading.Timer(0.1, store.tier.abandon, [np.array([2], np.uint32)]).start()
    check(store.serve([1, 2]), [1, 2])
    assert store.source.reads[0] == [1], "what nobody had claimed was read first"


def test_many_threads_read_each_sample_once():
    store = Store(CountingSource(), lru_tier(capacity=1 << 20))
    batches = np.random.default_rng(1).permutation(np.tile(np.arange(1000), 4)).reshape(-1, 50)
    with ThreadPoolExecutor(8) as pool:
        for served, ids in zip(pool.map(store.serve, batches), batches, strict=True):
            check(served, ids.tolist())
    assert sorted(chain.from_iterable(store.source.reads)) == list(range(1000))
    stats = store.stats()
    assert (stats["fetched"], stats["hits"]) == (1000, 3000)


def serve_all(store, seed):
    for ids in np.random.default_rng(seed).permutation(1000).reshape(-1, 50):
        check(store.serve(ids), ids.tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_share_the_cache_and_the_counts(method):
    with Store(CountingSource(), native_tier(1000, 1 << 20)) as store:
        context = multiprocessing.get_context(method)
        children = [context.Process(target=serve_all, args=(store, seed)) for seed in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 3
        stats = store.stats()
        assert (stats["accesses"], stats["bypassed"]) == (3000, 0)
        # On a busy machine a put may give up waiting for the lock: then it is read again.
        assert 0 <= stats["fetched"] - 1000 <= stats["tier"]["bypassed"]
        store.tier.arena.verify()
