import numpy as np

from stoker.store.tier import NullTier, Tier
from stoker.testing.tier_conformance import as_ids, pack_ids


def test_it_keeps_nothing_and_grants_everything():
    tier: Tier = NullTier()
    ids = as_ids([1, 2, 1])
    assert not tier.put_many(ids, pack_ids([1, 2, 1])).any()
    packed, found = tier.get_many(ids, 0)
    assert (packed.offsets.tolist(), packed.data.dtype) == ([0] * 4, np.uint8)
    assert not found.any()
    assert tier.claim(ids).all()
    assert tier.claim(ids).all()
    assert not tier.wait(ids, 10.0).any()
    tier.abandon(ids)
    tier.discard(ids)
    assert tier.stats() == {"capacity_bytes": 0, "payload_bytes": 0, "entries": 0}
    tier.close()
