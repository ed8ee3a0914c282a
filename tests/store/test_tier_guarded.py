import numpy as np
import pytest
from support.doubles import BrokenTier, lru_tier

from stoker.errors import CapacityError, SegmentError
from stoker.shared import SharedArray
from stoker.store.tier import GuardedTier
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids

METHODS = (
    "get_many", "put_many", "place_by", "set_keys", "move", "list", "copies", "resize", "claim",
    "abandon", "wait", "discard", "stats",
)  # fmt: skip


class TestGuardedTier(TierConformance):
    def make(self, num_ids, capacity_bytes):
        def failed():
            raise AssertionError("the tier below failed")

        return GuardedTier(lru_tier(num_ids, capacity_bytes), failed)


@pytest.mark.parametrize("error", [SegmentError, CapacityError, OSError])
def test_errors_become_misses_counted_each_and_warned_of_once(error):
    failures = []
    tier = GuardedTier(BrokenTier(*METHODS, error=error), lambda: failures.append(1))
    ids = as_ids([1, 2])
    with pytest.warns(RuntimeWarning, match="bypassed.*broken") as caught:
        assert not tier.get_many(ids)[1].any()
        assert not tier.put_many(ids, pack_ids([1, 2])).any()
        tier.place_by(SharedArray.create(10, np.uint8))
        tier.set_keys(ids, np.zeros(2))
        assert not tier.move(ids, "main").any()
        assert not tier.list("main").size
        assert not tier.copies(ids, "main").any()
        tier.resize({"main": 1.0})
        assert tier.claim(ids).all()
        tier.abandon(ids)
        assert not tier.wait(ids, 10.0).any()
        tier.discard(ids)
        assert tier.stats()["entries"] == 0
    assert len(caught) == 1
    assert len(failures) == len(METHODS)


def test_other_errors_are_bugs_and_come_through():
    tier = GuardedTier(BrokenTier("claim", error=ZeroDivisionError), lambda: None)
    with pytest.raises(ZeroDivisionError):
        tier.claim(as_ids([1]))
