"""The pool against real servers: what it keeps, and what becomes of it when they fail."""

import contextlib
import gc
import multiprocessing
import pickle
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import SampleNotFound
from stoker.store.packed import Packed
from stoker.store.pool import PoolTier
from stoker.store.pool_address import PoolAddress
from stoker.store.pool_keys import PREFIX
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids, sample_of
from store.redis_servers import Server, make_certificates, make_cluster, needs_server

pytestmark = [
    needs_server,
    pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
NUM = 200
EVERY = as_ids(range(NUM))
TTL = ("--maxmemory-policy", "volatile-ttl")


def sum_of_sizes(num_ids=NUM):
    return sum(len(sample_of(i)) for i in range(num_ids))


def pool_at(*servers, name="data", options="?timeout=5", num_ids=NUM, capacity=None):
    hosts = ",".join(server.name for server in servers)
    address = PoolAddress.parse(f"redis://{hosts}{options}")
    return PoolTier(address, name, num_ids, sum_of_sizes(num_ids), capacity)


@pytest.fixture(scope="module")
def shared_server():
    server = Server(*TTL, "--maxmemory", "100mb")
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def pool(server):
    tier = pool_at(server)
    yield tier
    tier.close()


@pytest.fixture
def make_server():
    made = []

    def make(*options, **more):
        made.append(Server(*options, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check(tier, ids, found=None):
    """Assert that what is found is right; return what is found."""
    samples, there = tier.get_many(as_ids(ids))
    assert samples.data.tobytes() == b"".join(
        sample_of(int(i)) for i, is_there in zip(ids, there, strict=True) if is_there
    )
    if found is not None:
        assert there.tolist() == list(found)
    return there


def fill(tier, ids=EVERY):
    return tier.put_many(as_ids(ids), pack_ids(list(map(int, ids))))


def until(condition, seconds=10.0):
    """Wait until something comes about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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

    def test_a_sample_larger_than_the_tier_is_refused(self, tier):
        """Servers have no room of ours: one that is full refuses, see below."""

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
        """There are none."""
        tier.abandon(as_ids([1]))

    def test_waiting_is_bounded(self, tier):
        """It ends at once."""
        assert not tier.wait(as_ids([1]), 30.0).any()

    def test_waiting_ends_when_the_claimant_is_done(self, tier):
        """There is none."""
        assert not tier.wait(as_ids([1]), 30.0).any()


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


# --- servers that fail ---


def test_a_killed_server_costs_misses_and_comes_back_empty(make_server):
    server = make_server(*TTL)
    tier = pool_at(server)
    fill(tier)
    server.kill()
    for _ in range(4):
        begin = time.monotonic()
        assert not check(tier, range(NUM)).any()
        assert time.monotonic() - begin < 5
    assert tier.stats()["pool_open"] == 1
    assert not fill(tier).any()
    server.start()
    until(lambda: fill(tier).all())
    assert check(tier, range(NUM)).all()
    assert tier.stats()["pool_open"] == 0
    tier.close()


def test_without_a_server_from_the_start_nothing_waits(make_server):
    server = make_server()
    server.kill()
    tier = pool_at(server)
    with pytest.warns(RuntimeWarning, match="the pool: .*no server answers"):
        tier.look()
    begin = time.monotonic()
    for _ in range(100):
        assert not tier.get_many(EVERY)[1].any()
    assert time.monotonic() - begin < 5
    server.start()
    until(lambda: fill(tier).all())
    tier.close()


def test_a_stopped_server_delays_one_read_by_the_bound_at_most(make_server):
    server = make_server(*TTL)
    tier = pool_at(server, options="?timeout=0.2")
    fill(tier)
    server.pause()
    took = []
    end = time.monotonic() + 5
    while time.monotonic() < end:
        begin = time.monotonic()
        assert not tier.get_many(EVERY)[1].any()
        took.append(time.monotonic() - begin)
        time.sleep(0.01)
    late = [seconds for seconds in took if seconds > 0.15]
    assert len(late) == 1
    assert tier.stats()["pool_open"] == 1
    server.resume()
    until(lambda: tier.get_many(EVERY)[1].all())
    assert check(tier, range(NUM)).all()
    assert tier.stats()["pool_open"] == 0
    tier.close()


@pytest.mark.parametrize("which", [0, 1])
def test_one_stopped_server_of_two_costs_its_half(which, make_server):
    servers = sorted([make_server(*TTL), make_server(*TTL)], key=lambda server: server.name)
    tier = pool_at(*servers, options="?timeout=0.5")
    fill(tier)
    for server in servers:
        with server.client() as client:
            assert client.dbsize() == NUM / 2
    servers[which].pause()
    for _ in range(2):
        assert check(tier, range(NUM)).sum() == NUM / 2
    assert tier.stats()["pool_open"] == 1
    servers[which].resume()
    until(lambda: check(tier, range(NUM)).all())
    tier.close()


def test_a_slow_server_is_passed_by(server):
    tier = pool_at(server, options="?timeout=0.6")
    fill(tier)
    for _ in range(3):
        with server.client() as client:
            client.client_pause(400)  # within its time
        assert check(tier, range(NUM)).all()
    assert not check(tier, range(NUM)).any()
    assert tier.stats()["pool_open"] == 1
    until(lambda: check(tier, range(NUM)).all())
    tier.close()


def test_a_server_that_never_ends_its_answer_is_waited_for_no_longer(make_server):
    """Each byte comes in time, the whole of them does not."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with contextlib.suppress(OSError), connection:
            while asked := connection.recv(1 << 16):
                if b"MGET" in asked:
                    while True:
                        connection.sendall(b"*1000\r\n")
                        time.sleep(0.05)
                is_slots = b"SLOTS" in asked
                refusal = b"-ERR This instance has cluster support disabled\r\n"
                connection.sendall(refusal if is_slots else b"+OK\r\n" * asked.count(b"*"))

    threading.Thread(target=drip, daemon=True).start()
    address = f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout=0.2"
    tier = PoolTier(PoolAddress.parse(address), "x", NUM, sum_of_sizes())
    begin = time.monotonic()
    assert not tier.get_many(EVERY)[1].any()
    assert time.monotonic() - begin < 2
    assert tier.stats()["pool_open"] == 1
    tier.close()
    listener.close()


def test_a_full_server_that_evicts_nothing_refuses_and_says_what_to_do(make_server):
    server = make_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    tier = pool_at(server)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tier.look()
        kept = fill(tier)
    assert 0 < kept.sum() < NUM
    command = f"redis-cli -h 127.0.0.1 -p {server.port} CONFIG SET maxmemory-policy volatile-ttl"
    messages = [str(warning.message) for warning in caught]
    assert any(command in message for message in messages)
    assert any("maxmemory" in m and "refuses" in m for m in messages)
    assert check(tier, range(NUM)).tolist() == kept.tolist()
    assert tier.stats()["pool_dropped"] == NUM - kept.sum()
    assert tier.stats()["pool_open"] == 0  # reading goes on
    tier.close()


def test_how_servers_are_set_up_is_checked(make_server):
    server = make_server()
    tier = pool_at(server, capacity=sum_of_sizes())
    with pytest.warns(RuntimeWarning, match=r"CONFIG SET maxmemory \d+`"):
        tier.look()
    with server.client() as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory", 2000)
    with pytest.warns(RuntimeWarning, match="pool_cache is .* and its servers have"):
        tier.look()
    assert tier.order.share < 0.2
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [state] = tier.look()
    assert (state.policy, state.limit_bytes) == ("volatile-ttl", 100 << 20)
    assert tier.order.share == 1.0
    tier.close()


# --- who may ---


def test_a_wrong_password_is_told_once_and_costs_misses(make_server):
    server = make_server("--requirepass", "right", *TTL)
    tier = PoolTier(PoolAddress.parse(f"redis://:wrong@{server.name}"), "x", NUM, sum_of_sizes())
    with pytest.warns(RuntimeWarning, match="refuses the password") as caught:
        for _ in range(5):
            assert not tier.get_many(EVERY)[1].any()
    assert not any("wrong@" in str(warning.message) for warning in caught)
    tier.close()
    tier = PoolTier(PoolAddress.parse(f"redis://:right@{server.name}"), "x", NUM, sum_of_sizes())
    assert fill(tier).all()
    tier.close()


def test_an_acl_user_with_the_rights_of_the_documentation_is_enough(make_server):
    server = make_server(*TTL, "--maxmemory", "100mb")
    text = (Path(__file__).parents[2] / "docs" / "pool.md").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("ACL SETUSER")]
    with server.client() as client:
        client.execute_command(*line.replace("PASSWORD", "pw").split())
        client.set("not-ours", "x")
    tier = PoolTier(PoolAddress.parse(f"redis://trainer:pw@{server.name}"), "x", NUM, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier.look()
        assert fill(tier).all()
        assert check(tier, range(NUM)).all()
        tier.set_keys(EVERY, np.arange(float(NUM)))
        tier.discard(EVERY[:1])
        assert tier.flush(10)
        assert not tier.get_many(EVERY[:1])[1].any()
    assert PREFIX in line
    tier.close()


def test_a_user_without_rights_costs_misses_and_is_told(make_server):
    server = make_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "u", "on", ">pw", "~stoker:*", "+ping")
    tier = PoolTier(PoolAddress.parse(f"redis://u:pw@{server.name}"), "x", NUM, 9)
    with pytest.warns(RuntimeWarning, match="the pool"):
        assert not tier.get_many(EVERY)[1].any()
    tier.close()


def test_tls_with_a_ca_of_ones_own(make_server, tmp_path):
    options = make_certificates(tmp_path)
    server = make_server(*options, *TTL, tls="yes")
    trusted = f"rediss://{server.name}?ca_certs={tmp_path / 'ca.crt'}"
    tier = PoolTier(PoolAddress.parse(trusted), "x", NUM, sum_of_sizes())
    assert fill(tier).all()
    assert check(tier, range(NUM)).all()
    tier.close()
    for wrong in (f"rediss://{server.name}", f"redis://{server.name}"):
        tier = PoolTier(PoolAddress.parse(wrong), "x", NUM, sum_of_sizes())
        assert not tier.get_many(EVERY)[1].any()
        tier.close()


# --- clusters ---


@pytest.fixture(scope="module")
def cluster():
    servers = make_cluster(3)
    yield servers
    for each in servers:
        each.close()


def test_a_cluster_holds_each_sample_once_and_evenly(cluster):
    tier = pool_at(cluster[1])  # one is enough to find the others
    assert fill(tier).all()
    assert check(tier, range(NUM)).all()
    tier.set_keys(EVERY, np.arange(float(NUM)))
    assert tier.flush(10)
    sizes = []
    for server in cluster:
        with server.client() as client:
            sizes.append(client.dbsize())
    assert sum(sizes) == NUM
    assert max(sizes) - min(sizes) <= NUM / 20
    states = tier.look()
    assert sorted(state.name for state in states) == sorted(server.name for server in cluster)
    assert sum(state.keys for state in states) == NUM
    tier.close()


def test_a_cluster_behind_tls_and_a_password(tmp_path):
    servers = make_cluster(3, secured=tmp_path)
    try:
        hosts = ",".join(server.name for server in servers[:2])
        url = f"valkeys://:pw@{hosts}?ca_certs={tmp_path / 'ca.crt'}&timeout=5"
        tier = PoolTier(PoolAddress.parse(url), "x", NUM, sum_of_sizes())
        assert fill(tier).all()
        assert check(tier, range(NUM)).all()
        assert sum(state.keys for state in tier.look()) == NUM
        tier.close()
    finally:
        for server in servers:
            server.close()


def test_slots_that_move_are_followed(cluster):
    import redis

    tier = pool_at(*cluster, name="moving")
    assert fill(tier).all()
    bucket_slot = int(tier.keys.slots[tier.keys.buckets(as_ids([7]))[0]])
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for server in cluster]
        ids = [client.cluster("myid") for client in clients]
        ids = [i.decode() if isinstance(i, bytes) else i for i in ids]
        owner = next(k for k, client in enumerate(clients) if _owns(client, ids[k], bucket_slot))
        target = (owner + 1) % 3
        keys = clients[owner].execute_command("CLUSTER", "GETKEYSINSLOT", bucket_slot, 100)
        clients[owner].delete(*keys)
        for client in clients:
            with contextlib.suppress(redis.ResponseError):
                client.execute_command("CLUSTER", "SETSLOT", bucket_slot, "NODE", ids[target])
    until(lambda: fill(tier, [7]).all() and check(tier, [7]).all())
    tier.close()


def _owns(client, node_id, slot):
    slots = client.execute_command("CLUSTER", "SLOTS")
    flat = slots if isinstance(slots, list) else []
    for entry in flat:
        if entry[0] <= slot <= entry[1]:
            owner = entry[2][2]
            return (owner.decode() if isinstance(owner, bytes) else owner) == node_id
    return False


def test_a_cluster_fails_over_under_reads():
    servers = make_cluster(3, replicas=1)
    try:
        tier = pool_at(*servers)
        assert fill(tier).all()
        with servers[0].client() as client:
            client.wait(1, 2000)
        until(lambda: _replicated(servers))
        servers[0].kill()
        begin = time.monotonic()
        slowest, everything = 0.0, False
        while not everything and time.monotonic() - begin < 30:
            before = time.monotonic()
            everything = check(tier, range(NUM)).all()
            slowest = max(slowest, time.monotonic() - before)
            time.sleep(0.02)
        assert everything  # the replica has them all
        assert slowest < 2 * tier.limit(NUM) + 2
        assert fill(tier).all()
        tier.close()
    finally:
        for server in servers:
            server.close()
        gc.collect()


def _replicated(servers):
    """Whether each replica has what its primary has."""
    sizes = []
    for server in servers:
        with server.client() as client:
            sizes.append(client.dbsize())
    return sum(sizes) == 2 * NUM


def test_a_source_that_fails_is_the_sources_matter(pool):
    from stoker.store.upstream import Upstream
    from store.doubles import CountingSource

    source = CountingSource(bad=[3])
    pool.put_many(as_ids([1]), Packed(np.frombuffer(b"\1\0\0\0", np.uint8), np.array([0, 4])))
    brought = Upstream(source, pool).read(as_ids([3, 1, 2]))
    assert isinstance(brought.errors[0], SampleNotFound)
    assert brought.pooled.tolist() == [False, True, False]
    assert source.reads == [[3, 2]]
    assert np.diff(brought.samples.offsets).tolist() == [0, 4, 8]
    assert pool.flush(10)
    assert pool.get_many(as_ids([1, 2, 3]))[1].tolist() == [True, True, False]
