"""Pools for tests: with samples that are known by their ids."""

from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier
from stoker.testing.tier_conformance import as_ids, pack_ids, sample_of

NUM = 200
EVERY = as_ids(range(NUM))
TTL = ("--maxmemory-policy", "volatile-ttl")


def sum_of_sizes(num_ids=NUM):
    return sum(len(sample_of(i)) for i in range(num_ids))


def pool_at(*servers, name="data", options="?timeout=20", num_ids=NUM, capacity=None):
    hosts = ",".join(server.name for server in servers)
    address = PoolAddress.parse(f"redis://{hosts}{options}")
    return PoolTier(address, name, num_ids, sum_of_sizes(num_ids), capacity)


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
