"""Memory over disk."""

import numpy as np
import pytest

from stoker.policy.lru import LRU
from stoker.store.arena import Arena
from stoker.store.memory import MemoryTier
from stoker.store.stacked import StackedTier
from stoker.testing.tier_conformance import TierConformance, as_ids, pack_ids


class TestStacked(TierConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.path = tmp_path / "samples"

    def make(self, num_ids, capacity_bytes):
        return stacked(self.path, num_ids, capacity_bytes // 4, capacity_bytes * 3 // 4)


def stacked(path, num_ids, memory_bytes, disk_bytes, regions=None, **options):
    arenas = [Arena(num_ids, memory_bytes, 200), Arena(num_ids, disk_bytes, 200, path)]
    for arena in arenas:
        arena.configure(regions or LRU().regions())
    return StackedTier(*map(MemoryTier, arenas), **options)
