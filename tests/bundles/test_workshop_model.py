"""Any order of steps, damage and evictions: what must hold after each of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from bundles_bench import MIN_BYTES, NUM, SIZES, Bench
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.bundles.workshop import Loaded

SEEDS = st.integers(0, 2**16)


class Packing(RuleBasedStateMachine):
    """Builds, loads, serves and breaks things in any order."""

    @initialize(packages=st.integers(2, 5))
    def make(self, packages: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.bench = Bench(Path(self.folder.name) / "packages", low_bytes=packages * MIN_BYTES)
        self.unserved: set[int] = set()
        self.evicted: set[int] = set()

    @rule(seed=SEEDS, share=st.sampled_from([0.0, 0.02, 0.3, 0.8, 1.0]))
    def begin(self, seed: int, share: float) -> None:
        rng = np.random.default_rng(seed)
        low = rng.random(NUM) < share
        # As the policy does: what is important now leaves L.
        self.bench.arena.discard(np.flatnonzero(~low))
        self.bench.begin(low, low & (rng.random(NUM) < 0.1))
        self.unserved = set(self.bench.cached.tolist())
        self.evicted = set()

    @rule()
    def build(self) -> None:
        self.bench.workshop.build()

    @rule()
    def load(self) -> None:
        before = set(self.bench.cached.tolist())
        loaded = self.bench.workshop.load()
        held = set(self.bench.cached.tolist())
        assert self.unserved <= held  # nothing unserved ever leaves for a package
        if loaded is not Loaded.DONE:
            assert held == before
        self.unserved = {n for n in held if not self._is_served(n)}

    @rule(seed=SEEDS, share=st.sampled_from([0.1, 0.5, 1.0]))
    def serve(self, seed: int, share: float) -> None:
        if self.unserved:
            ids = np.array(sorted(self.unserved), np.uint32)
            ids = ids[np.random.default_rng(seed).random(len(ids)) <= share]
            self.bench.serve(ids)
            self.unserved -= set(ids.tolist())

    @rule(seed=SEEDS)
    def evict(self, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, NUM, 20).astype(np.uint32)
        self.bench.arena.discard(ids)
        self.unserved -= set(ids.tolist())
        self.evicted |= set(ids.tolist())

    @precondition(lambda self: self.bench.depot.names())
    @rule(seed=SEEDS, flip=st.booleans())
    def damage(self, seed: int, flip: bool) -> None:
        names = self.bench.depot.names()
        victim = self.bench.path / names[seed % len(names)]
        if flip:
            whole = bytearray(victim.read_bytes())
            whole[seed % len(whole)] ^= 1
            victim.write_bytes(whole)
        else:
            victim.unlink()

    @rule()
    def start_again(self) -> None:
        low, stamp = self.bench.low, self.bench.stamp
        self.bench.workshop = self.bench.another()
        self.bench.workshop.adopt()
        if stamp:
            self.bench.stamp -= 1
            self.bench.begin(low)
        self.evicted = set()

    @invariant()
    def the_region_keeps_its_budget(self) -> None:
        region = self.bench.arena.stats()["regions"]["L"]
        assert region["bytes"] <= region["budget"]
        self.bench.arena.verify()

    @invariant()
    def only_low_samples_are_brought(self) -> None:
        flagged = np.flatnonzero(self.bench.packaged)
        assert self.bench.low[flagged].all()
        brought = self.bench.cached
        assert self.bench.low[brought].all()
        assert np.isin(brought, flagged).all()

    @invariant()
    def the_catalogue_lists_what_lies_in_the_depot(self) -> None:
        catalogue = self.bench.workshop._catalogue
        listed = {catalogue.name(number) for number in catalogue.numbers()}
        assert set(self.bench.depot.names()) <= listed
        for number in catalogue.numbers():
            at_home = catalogue.homes == number + 1
            assert SIZES[at_home].sum() <= 2 * MIN_BYTES

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            # Whatever happened: everything of low importance comes in the end, once an epoch.
            while True:
                self.bench.settle()
                fresh = [n for n in self.bench.cached.tolist() if not self._is_served(n)]
                if not fresh:
                    break
                self.bench.serve(np.array(fresh, np.uint32))
            missing = np.flatnonzero(self.bench.low & (self.bench.served.array < self.bench.stamp))
            assert set(missing.tolist()) <= self.evicted
            self.bench.close()
            self.folder.cleanup()

    def _is_served(self, number: int) -> bool:
        return bool(self.bench.served.array[number] >= self.bench.stamp)


Packing.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPacking = Packing.TestCase
