"""The pool on real clusters: even, encrypted, moved, failing over."""

import contextlib
import gc
import time

import numpy as np
import pytest
from support.pools import EVERY, NUM, check, fill, pool_at, sum_of_sizes
from support.redis_servers import make_cluster, needs_server
from support.waiting import until

from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier
from stoker.testing.tier_conformance import as_ids

pytestmark = [
    needs_server,
    pytest.mark.filterwarnings("ignore:the pool:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


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

        def set_slot(node: int, *how: str) -> None:
            clients[node].execute_command("CLUSTER", "SETSLOT", bucket_slot, *how)

        # In this order the new owner raises its epoch: otherwise word from the old one, that was on
        # its way, took the slot from it again, and then nobody had it.
        set_slot(target, "IMPORTING", ids[owner])
        set_slot(owner, "MIGRATING", ids[target])
        for node in (target, owner, (owner + 2) % 3):
            set_slot(node, "NODE", ids[target])
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
        seconds = []

        def finds_all():
            begin = time.monotonic()
            found = check(tier, range(NUM)).all()
            seconds.append(time.monotonic() - begin)
            return found

        until(finds_all, 30)  # the replica has them all
        assert max(seconds) < 2 * tier.limit(NUM) + 2
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
