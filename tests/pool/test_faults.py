"""What becomes of the pool when its servers fail, are full, or refuse."""

import contextlib
import socket
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.pools import EVERY, NUM, TTL, check, fill, pool_at, sum_of_sizes
from support.redis_servers import make_certificates, needs_server
from support.waiting import until

from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier
from stoker.pool.servers import Breakers
from stoker.pool.values import PREFIX

pytestmark = [
    needs_server,
    pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def test_a_killed_server_costs_misses_and_comes_back_empty(make_server):
    server = make_server(*TTL)
    tier = pool_at(server)
    fill(tier)
    server.kill()
    for _ in range(4):
        begin = time.monotonic()
        assert not check(tier, range(NUM)).any()
        assert time.monotonic() - begin < 20
    assert tier.stats()["pool_open"] == 1
    assert not fill(tier).any()
    server.start()
    until(lambda: fill(tier).all())
    assert check(tier, range(NUM)).all()
    assert tier.stats()["pool_open"] == 0
    tier.close()


def any_found(tier):
    found = check(tier, range(NUM)).any()
    assert not found
    return found


def test_a_server_that_is_away_counts_once_also_for_who_never_met_it(make_server):
    server = make_server(*TTL)
    tier = pool_at(server)
    fill(tier)
    server.kill()
    for trips in (1, 2):
        until(lambda trips=trips: not any_found(tier) and tier.stats()["pool_trips"] >= trips)
        tier.close()  # what follows is what another process of the job sees
        assert tier.stats()["pool_trips"] == trips
        assert tier.stats()["pool_open"] == 1
    server.start()
    until(lambda: fill(tier).all())
    until(lambda: tier.stats()["pool_open"] == 0)
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
    assert time.monotonic() - begin < 20
    server.start()
    until(lambda: fill(tier).all())
    tier.close()


def test_a_stopped_server_delays_one_read_by_the_bound_at_most(make_server):
    """Those after it do not ask, until the pause is over and a probe finds the server well."""
    server = make_server(*TTL)
    tier, now = pool_at(server, options="?timeout=3"), 0.0
    tier.breakers = Breakers(clock=lambda: now)
    fill(tier)
    before = reads_seen_by(server)
    server.pause()
    assert not tier.get_many(EVERY)[1].any()  # ends though the server stays stopped
    assert tier.stats()["pool_errors"] == tier.stats()["pool_trips"] == 1
    for _ in range(100):
        assert not tier.get_many(EVERY)[1].any()
        assert tier.stats()["pool_errors"] == 1, "one more waited for it"
    assert tier.stats()["pool_trips"] == tier.stats()["pool_open"] == 1
    server.resume()
    until(lambda: reads_seen_by(server) > before)
    assert not tier.get_many(EVERY)[1].any(), "it is asked before the pause is over"
    assert reads_seen_by(server) == before + 1
    now = 10.0
    until(lambda: check(tier, range(NUM)).all())
    assert tier.stats()["pool_open"] == 0
    assert tier.stats()["pool_trips"] == 1
    tier.close()


def reads_seen_by(server):
    """Return how many reads the server has executed."""
    with server.client() as client:
        return client.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("connected", [True, False])
def test_one_stopped_server_of_two_costs_its_half(connected, which, make_server):
    servers = sorted([make_server(*TTL), make_server(*TTL)], key=lambda server: server.name)
    tier = pool_at(*servers, options="?timeout=2")
    fill(tier)
    for server in servers:
        with server.client() as client:
            assert client.dbsize() == NUM / 2
        if not connected:  # opening takes time, too, of which the other one needs some
            tier._client().servers.drop(server.name)
    servers[which].pause()
    for _ in range(2):
        assert check(tier, range(NUM)).sum() == NUM / 2
    assert tier.stats()["pool_open"] == 1
    servers[which].resume()
    until(lambda: check(tier, range(NUM)).all())
    tier.close()


def test_a_slow_server_is_passed_by(server):
    tier = pool_at(server, options="?timeout=2")
    fill(tier)
    for _ in range(3):
        with server.client() as client:
            client.client_pause(1300)  # within its time, but slow
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
    assert time.monotonic() - begin < 20  # of 50
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
    with pytest.warns(RuntimeWarning, match="pool_size is .* and its servers have"):
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
