"""What the tests of the store put in place of slow or failing parts."""

import threading

import numpy as np
from reference.arena import ReferenceArena

from stoker.errors import SampleNotFound, SegmentError
from stoker.policy.baselines import LRU
from stoker.source.base import BaseSource
from stoker.store.memory_tier import MemoryTier
from stoker.store.tier import NullTier


def sample_of(i):
    return int(i).to_bytes(4, "little") * (int(i) % 13)


class CountingSource(BaseSource):
    """Notes every read; ids in ``bad`` are gone, and ``gate`` holds reads up."""

    fingerprint = "counting"

    def __init__(self, num_samples=1000, bad=()):
        self.sizes = np.array([len(sample_of(i)) for i in range(num_samples)])
        self.bad = set(bad)
        self.reads = []
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self):
        return len(self.sizes)

    def read(self, ids):
        raise NotImplementedError

    def read_packed(self, ids):
        self.reads.append(np.asarray(ids).tolist())
        assert self.gate.wait(30)
        samples = [b"" if i in self.bad else sample_of(i) for i in ids]
        data = np.frombuffer(b"".join(samples), np.uint8)
        offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
        errors = {k: SampleNotFound(f"sample {i}") for k, i in enumerate(ids) if i in self.bad}
        return data, offsets, errors

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["gate"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.gate = threading.Event()
        self.gate.set()


def lru_tier(num_ids=1000, capacity=10_000):
    arena = ReferenceArena(num_ids, capacity)
    arena.configure(LRU().regions())
    return MemoryTier(arena)


class BrokenTier(NullTier):
    """Fails at the methods named."""

    def __init__(self, *broken, error=SegmentError):
        for name in broken:
            setattr(self, name, self._fail)
        self._error = error

    def _fail(self, *args):
        raise self._error("broken")


def check(served, ids):
    """Assert that the right samples came, in order."""
    assert served.ids.tolist() == list(ids)
    for k, i in enumerate(ids):
        if k not in served.errors:
            assert served[k].tobytes() == sample_of(i)
