"""The pool against a real server: what it keeps, and for whom."""

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.doubles import CountingSource
from support.pools import EVERY, NUM, TTL, check, fill, pool_at, sum_of_sizes
from support.redis_servers import needs_server
from support.waiting import until

from stoker.errors import SampleNotFound
from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier
from stoker.source.packed import Packed
from stoker.store.flight import Upstream
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids

pytestmark = [
    needs_server,
    pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

_FOREVER = 1e6  # seconds: a test that waits for them fails


@pytest.fixture
def pool(server):
    tier = pool_at(server)
    yield tier
    tier.close()


class TestPool(TierConformance):
    """What a pool cannot promise is overridden, with what it does instead."""

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def make(self, num_ids, capacity_bytes):
        return pool_at(self.server, num_ids=num_ids, capacity=None)

    def test_put_again_is_harmless(self, tier):
        """The server counts entries, not the tier."""
        for _ in range(2):
            assert fill(tier, [5]).all()
        with self.server.client() as client:
            assert client.dbsize() == 1

    def test_a_sample_larger_than_the_tier_is_refused(self, make_server):
        """A server has the last word: what it refuses is counted, and smaller ones are stored."""
        server = make_server("--maxmemory", "4mb", *TTL)
        tier = pool_at(server)
        size = 5 << 20
        large = Packed(np.zeros(size, np.uint8), np.array([0, size]))
        assert not tier.put_many(as_ids([1]), large).any()
        check(tier, [1], [False])
        assert tier.stats()["pool_dropped"] == 1
        tier.close()  # with the connection, in whose buffer at the server the large one still is
        until(lambda: fill(tier, [1, 2]).all())
        check(tier, [1, 2], [True, True])
        tier.close()

    def test_the_capacity_is_never_exceeded(self, tier):
        """Only as many of the best samples are stored as have room."""
        tier.order.share = 0.25
        kept = fill(tier)
        assert 0.2 < kept.mean() < 0.3
        assert check(tier, range(NUM)).tolist() == kept.tolist()

    def test_lists_name_what_is_found_and_moves_keep_it(self, tier):
        """There are no regions on a server; keys are lifetimes."""
        fill(tier, [5, 7])
        assert not tier.move(as_ids([5]), "main").any()
        assert not tier.list("main").size
        tier.set_keys(as_ids([5, 9]), np.array([1.0, 2.0]))
        assert tier.flush(10)
        check(tier, [5, 7, 9], [True, True, False])

    def test_discarded_samples_are_gone(self, tier):
        """A moment later."""
        fill(tier, [1, 2])
        tier.discard(as_ids([2, 3]))
        assert tier.flush(10)
        check(tier, [1, 2], [True, False])

    def test_one_claimant_each(self, tier):
        """Single flight is the node's; here everyone may fetch everything."""
        assert tier.claim(as_ids(range(5))).all()
        assert tier.claim(as_ids(range(5))).all()

    def test_claims_end_by_putting_or_abandoning(self, tier):
        """They bind nobody: neither what was put nor what was abandoned is anyone's."""
        assert tier.claim(as_ids([1, 2])).all()
        tier.abandon(as_ids([1, 5]))
        assert fill(tier, [2]).all()
        check(tier, [1, 2, 5], [False, True, False])
        assert tier.claim(as_ids([1, 2, 5])).all()

    def test_waiting_is_bounded(self, tier):
        """It ends at once, also for what somebody claimed."""
        assert tier.claim(as_ids([2])).all()
        assert not tier.wait(as_ids([1, 2]), _FOREVER).any()

    def test_waiting_ends_when_the_claimant_is_done(self, tier):
        """There is none to wait for; whoever asks again after a put finds it."""
        assert tier.claim(as_ids([1])).all()
        assert not tier.wait(as_ids([1]), _FOREVER).any()
        assert fill(tier, [1]).all()
        check(tier, [1], [True])


# --- what is kept ---


def test_each_sample_is_there_once_whoever_writes_it(server, pool):
    other = pool_at(server)
    assert fill(pool).all()
    assert fill(other).all()
    with server.client() as client:
        assert client.dbsize() == NUM
    assert check(other, range(NUM)).all()
    stats = other.stats()
    assert (stats["pool_asked"], stats["pool_hits"]) == (NUM, NUM)
    assert stats["pool_bytes"] == sum_of_sizes()
    assert stats["pool_open"] == stats["pool_errors"] == stats["pool_damaged"] == 0
    other.close()


def test_another_data_set_finds_nothing(server, pool):
    fill(pool)
    other = pool_at(server, name="another")
    assert not check(other, range(NUM)).any()
    other.close()


def test_what_is_offered_comes_there_in_the_background(pool):
    pool.offer(EVERY, pack_ids(range(NUM)))
    assert pool.flush(10)
    assert check(pool, range(NUM)).all()
    assert pool.stats()["pool_written"] == NUM


def test_what_is_done_to_samples_after_they_were_offered_matters_not(pool):
    gate = threading.Event()
    pool._client().writer.put(gate.wait)
    packed = pack_ids(range(NUM))
    mine = Packed(packed.data.copy(), packed.offsets)
    pool.offer(EVERY, mine)
    mine.data[:] = 0  # as a transform in place may do
    gate.set()
    assert pool.flush(10)
    assert check(pool, range(NUM)).all()
    assert pool.get_many(EVERY)[0].data.flags.writeable


def test_too_much_at_once_is_dropped_and_counted(pool):
    class Full:
        def put(self, job, num_bytes=0):
            return False

    client = pool._client()
    writer, client.writer = client.writer, Full()
    pool.offer(EVERY, pack_ids(range(NUM)))
    client.writer = writer
    assert pool.stats()["pool_dropped"] == NUM


def test_importance_is_time_to_live(server, pool):
    keys = np.random.default_rng(0).permutation(NUM).astype(float)
    pool.reorder(keys)
    pool.put_many(EVERY, pack_ids(range(NUM)), keys)
    assert pool.flush(10)
    names = pool.keys.names(EVERY)

    def lifetimes():
        with server.client() as client:
            return np.array([client.pttl(name) for name in names])

    before = lifetimes()
    assert (before > 23 * 3600 * 1000).all()
    low, high = before[keys < NUM / 2], before[keys >= NUM / 2]
    assert low.max() < high.min() + 13 * 3600 * 1000  # a level on the border belongs to both
    pool.reorder(-keys)
    until(lambda: lifetimes()[keys < NUM / 4].min() > lifetimes()[keys > NUM * 3 / 4].max())
    pool.get_many(EVERY[:1], np.array([1e9]))
    assert pool.flush(10)
    assert lifetimes()[0] == pytest.approx(max(lifetimes()), abs=60_000)


def test_the_server_evicts_the_least_important(make_server):
    size, count = 10_000, 600
    server = make_server(*TTL, "--maxmemory", "4mb", "--maxmemory-samples", "64")
    tier = PoolTier(PoolAddress.parse(f"redis://{server.name}"), "x", count, size * count)
    keys = np.random.default_rng(1).permutation(count).astype(float)
    tier.reorder(keys)
    ids = np.arange(count, dtype=np.uint32)
    data = np.repeat(ids.astype(np.uint8), size)
    tier.put_many(ids, Packed(data, np.arange(count + 1) * size), keys)
    _, found = tier.get_many(ids)
    assert 100 < found.sum() < 400
    assert np.median(keys[found]) > np.quantile(keys, 0.75)
    tier.close()


# --- processes ---


def ask(tier, ids, results):
    results.put((tier.get_many(ids)[1].sum(), tier.put_many(ids[:1], pack_ids([0])).sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_open_their_own_connections(pool, method):
    fill(pool, range(10))  # connections and threads that a child must not use
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=ask, args=(pool, as_ids(range(20)), results))
    child.start()
    assert results.get(timeout=60) == (10, 1)
    child.join(30)
    assert child.exitcode == 0
    assert pool.stats()["pool_hits"] == 10


def offer(tier):
    tier.offer(EVERY, pack_ids(range(NUM)))


def test_a_process_that_ends_writes_what_it_was_given(pool):
    child = multiprocessing.get_context("fork").Process(target=offer, args=(pool,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert check(pool, range(NUM)).all()


def test_passed_on_it_shows_no_password(server):
    tier = PoolTier(PoolAddress.parse("redis://:secret@h"), "x", 1, 1)
    assert "secret" not in repr(tier.address) + repr(tier.stats())
    assert "_of_process" not in tier.__getstate__()
    with pytest.raises(TypeError):
        pickle.dumps(tier)  # its shared memory passes to children only
    tier.close()


def test_threads_that_begin_at_once_all_find_everything(server, pool):
    fill(pool)
    late = pool_at(server)
    start = threading.Barrier(16)

    def read(_):
        start.wait()
        return check(late, range(NUM)).all()

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(read, range(16)))
    late.close()


# --- bytes that are not ours ---


def test_damaged_and_foreign_values_are_misses_and_are_written_anew(server, pool):
    fill(pool)
    names = pool.keys.names(EVERY)
    with server.client() as client:
        value = client.get(names[10])
        client.set(names[10], value[:-1] + bytes([value[-1] ^ 1]))  # flipped
        client.set(names[11], client.get(names[11])[:-1])  # cut short
        client.set(names[12], "hello")  # by someone else
        client.set(names[13], client.get(names[14]))  # of another sample
        client.delete(names[15])
        client.lpush(names[15], "a", "list")  # of another kind
        client.setrange(names[16], 5, b"\xff\xff")  # a damaged header
    bad = [10, 11, 12, 13, 15, 16]
    there = check(pool, range(NUM))
    assert np.flatnonzero(~there).tolist() == bad
    assert pool.stats()["pool_damaged"] == 5
    assert fill(pool, bad).all()
    assert check(pool, range(NUM)).all()


def test_a_source_that_fails_is_the_sources_matter(pool):
    source = CountingSource(bad=[3])
    pool.put_many(as_ids([1]), Packed(np.frombuffer(b"\1\0\0\0", np.uint8), np.array([0, 4])))
    brought = Upstream(source, pool).read(as_ids([3, 1, 2]))
    assert isinstance(brought.errors[0], SampleNotFound)
    assert brought.pooled.tolist() == [False, True, False]
    assert source.reads == [[3, 2]]
    assert np.diff(brought.samples.offsets).tolist() == [0, 4, 8]
    assert pool.flush(10)
    assert pool.get_many(as_ids([1, 2, 3]))[1].tolist() == [True, True, False]
