"""Placement as a whole, against plain references and under load: nothing wrong is ever served."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.region import turn_of

from stoker.policy import HighLow, Homophily, Substitution
from stoker.scores import Scores
from stoker.shared import SharedArray
from stoker.source.held import MemorySource
from stoker.source.packed import Packed
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier
from stoker.store.store import Store
from stoker.types import Outcome

N = 24
SIZE = 10
HIGH, LOW = HighLow.HIGH, HighLow.LOW
HIT, SUBSTITUTED, FETCHED = Outcome.HIT, Outcome.SUBSTITUTED, Outcome.FETCHED


def sample(i, size=SIZE):
    return bytes([i % 251, i // 251]) * (size // 2)


def label(data):
    """What a data set would derive from the bytes."""
    return int(data[0]) + 251 * int(data[1])


def icache(policy, num_ids=N, size=SIZE, room=8, **options):
    """A store with H and L caches of equal budgets, for ``room`` samples in all."""
    arena = Arena(num_ids, room * size, size, exact=True)
    arena.configure(policy.regions())
    places = SharedArray.create(num_ids, np.uint8)
    return Store(
        MemorySource([sample(i, size) for i in range(num_ids)]),
        MemoryTier(arena, "H"),
        places=places,
        substitution=Substitution("low_by_low", "L"),
        follows_scores=True,
        **options,
    )


# --- iCache's Algorithm 1 ---


@dataclass
class Algorithm1:
    """iCache's Algorithm 1, read off the paper, with substitution in the L-cache."""

    room: int
    high: set[int]
    scores: dict[int, float]
    h_cache: set[int] = field(default_factory=set)
    l_cache: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    displaced: dict[int, int] = field(default_factory=dict)

    def access(self, i, got):
        """Return what has to come for ``i``: outcome and the samples that may be served."""
        if i in self.high:
            return self._high(i)
        if i in self.l_cache and i not in self.served:
            return HIT, {i}
        free = self.l_cache - self.served
        if free:
            self.displaced[got] = i
            return SUBSTITUTED, free
        # None is left: the one asked for is read, or the one in whose place it was served.
        turn = i
        while turn in self.served:
            turn = self.displaced[turn]
        if len(self.l_cache) < self.room:
            self.l_cache.add(turn)
        return FETCHED, {turn}

    def _high(self, i):
        if i in self.h_cache | self.l_cache:
            return HIT, {i}
        if len(self.h_cache) < self.room:
            self.h_cache.add(i)
        else:
            lowest = min(self.h_cache, key=lambda j: (self.scores[j], turn_of(j)))
            if self.scores[i] > self.scores[lowest]:
                self.h_cache ^= {i, lowest}
        return FETCHED, {i}


@settings(max_examples=40, deadline=None)
@given(
    orders=st.lists(st.permutations(range(N)), min_size=1, max_size=3),
    values=st.lists(st.integers(0, 6), min_size=N, max_size=N),
    changes=st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, 6)), max_size=20),
    h_share=st.sampled_from([0.3, 0.5, 0.8]),
)
def test_icache_matches_algorithm_1(orders, values, changes, h_share):
    from stoker.sampler.uniform import UniformSampler

    policy, scores = HighLow(h_share, start=0.5), Scores(N)
    scores.update(np.arange(N), np.array(values, float), step=0)
    with icache(policy) as store:
        places = policy.places(scores, UniformSampler(N, seed=1).plan(None, 0), N)
        store.places.array[:] = places
        paper = Algorithm1(
            4, set(np.flatnonzero(places == HIGH).tolist()), dict(enumerate(map(float, values)))
        )
        changes = iter(changes)
        for epoch, order in enumerate(orders):
            store.begin_epoch(epoch)
            paper.served.clear()
            paper.displaced.clear()
            for i in order:
                ids = np.array([i], np.uint32)
                served = store.serve(ids, policy.keys(ids, scores, None, None))
                got = int(served.ids[0])
                outcome, allowed = paper.access(i, got)
                assert (served.outcomes[0], got in allowed) == (outcome, True)
                assert served[0].tobytes() == sample(got)
                paper.served.add(got)
                learnt, value = next(changes, (None, None))
                if learnt is not None:
                    ids = np.array([learnt], np.uint32)
                    scores.update(ids, [value], step=1)
                    store.tier.set_keys(ids, policy.keys(ids, scores, None, None))
                    paper.scores[learnt] = float(value)
                assert set(store.tier.list("H").tolist()) == paper.h_cache
                assert set(store.tier.list("L").tolist()) == paper.l_cache
        store.tier.arena.verify()


def test_icache_three_cases():
    """An H-sample is fetched for what it is; an L-sample hits; a missing L-sample is replaced."""
    with icache(HighLow(start=0.5)) as store:
        store.places.array[[1, 2]] = LOW
        store.serve([1])
        store.begin_epoch(0)
        assert store.serve([0]).outcomes.tolist() == [FETCHED]
        replaced = store.serve([2])
        assert (replaced.ids.tolist(), replaced.outcomes.tolist()) == ([1], [SUBSTITUTED])
        store.begin_epoch(1)
        assert store.serve([1, 0]).outcomes.tolist() == [HIT, HIT]


def test_spidercache_four_cases():
    """In the order of look-up: importance, a key sample itself, a neighbour of one, the source."""
    policy = Homophily(importance=0.5, transit=0.2)
    with Arena(N, 10 * SIZE, SIZE) as arena:
        arena.configure(policy.regions())
        store = Store(
            MemorySource([sample(i) for i in range(N)]),
            MemoryTier(arena, "importance", overflow=policy.overflow),
            substitution=Substitution("neighbour", "homophily"),
        )
        store.serve([1, 2, 3], np.array([3.0, 2.0, 1.0]))
        ids, degrees = np.array([1, 2, 3], np.uint32), np.array([0, 3, 1])
        near = [np.array(some, np.uint32) for some in ([], [1, 7, 8], [])]
        kept = store.keep_key_sample(ids, degrees, near.__getitem__)
        assert kept == 2
        served = store.serve([1, 2, 7, 9])  # 1 is a neighbour too, and cached for its importance
        assert served.ids.tolist() == [1, 2, 2, 9]
        assert served.outcomes.tolist() == [HIT, HIT, SUBSTITUTED, FETCHED]
        assert [label(served[k]) for k in range(4)] == [1, 2, 2, 9]
        arena.verify()


# --- under load ---


MANY = 600
BIG = 200


@pytest.fixture
def busy():
    """A store in which everything happens: places, substitution, packages, fresh ones, budgets."""
    packaged = SharedArray.create(MANY, np.uint8)
    store = icache(HighLow(start=0.5), MANY, BIG, 200, packaged=packaged)
    store.places.array[::2] = LOW
    yield store
    store.tier.arena.verify()
    store.close()


def disturb(store, seed, stop):
    """Move budgets and samples about, change places, bring packages, read ahead."""
    random = np.random.default_rng(seed)
    fresh, arena = store.expect_prefetch()[0].array, store.tier.arena
    regions = HighLow(start=0.5).regions()
    for turn in range(10**9):
        if stop.is_set():
            return
        share = random.uniform(0.1, 0.9)
        store.tier.resize({"H": share, "L": 1 - share})
        ids = random.choice(MANY, 8, replace=False).astype(np.uint32)
        samples = b"".join(sample(int(i), BIG) for i in ids)
        store.packaged.array[ids] = 1
        offsets = np.arange(9, dtype=np.int64) * BIG
        arena.put_many(ids, Packed(np.frombuffer(samples, np.uint8), offsets), None, "L")
        fresh[random.integers(0, MANY, 4)] = 1
        store.tier.move(random.integers(0, MANY, 8).astype(np.uint32), "H", random.random(8))
        arena.discard_from("L", random.integers(0, MANY, 8).astype(np.uint32))
        store.places.array[random.integers(0, MANY, 4)] = random.integers(0, 2, 4)
        if turn % 20 == 0:
            store.rearrange(regions, random.random(MANY).take)
            arena.verify()


def serve_for(store, seed, batches, failures):
    random = np.random.default_rng(seed)
    try:
        for _ in range(batches):
            ids = random.integers(0, MANY, 16)
            served = store.serve(ids, random.random(16))
            for k, i in enumerate(served.ids.tolist()):
                assert served[k].tobytes() == sample(i, BIG)
                assert label(served[k]) == i
            own = served.outcomes != SUBSTITUTED
            assert (own | (served.ids != ids)).all()
    except BaseException as error:
        failures.append(error)
        raise


def run_busy(store, batches=150, threads=4):
    stop, failures = threading.Event(), []
    store.expect_prefetch()
    store.begin_epoch(0)
    workers = [
        threading.Thread(target=serve_for, args=(store, n, batches, failures))
        for n in range(threads)
    ]
    other = threading.Thread(target=disturb, args=(store, 99, stop))
    for thread in (*workers, other):
        thread.start()
    for turn, worker in enumerate(workers):
        store.begin_epoch(turn + 1)
        worker.join()
    stop.set()
    other.join()
    assert not failures


def test_label_matches_bytes(busy):
    """Whatever is served for whatever, the ids say what the bytes are."""
    run_busy(busy)
    stats = busy.stats()
    parts = ("hits", "substituted", "fetched", "packaged")
    assert stats["accesses"] == sum(stats[part] for part in parts) == 4 * 150 * 16
    assert all(stats[part] for part in parts)
    assert stats["bypassed"] == 0
    assert stats["bytes_from_cache"] + stats["bytes_from_source"] == stats["accesses"] * BIG


def test_cached_bytes_identical(busy):
    """After all moves, evictions and budgets, what is cached is what the source has."""
    run_busy(busy, batches=60)
    ids = np.arange(MANY, dtype=np.uint32)
    packed, found = busy.tier.get_many(ids)
    assert found.sum() > 20
    assert packed.data.tobytes() == b"".join(sample(int(i), BIG) for i in ids[found])


def test_budgets_move_while_readers_and_writers_run(busy):
    run_busy(busy, batches=60)
    regions = busy.tier.stats()["regions"]
    assert sum(region["budget"] for region in regions.values()) == 200 * BIG
    assert all(region["bytes"] <= region["budget"] for region in regions.values())


def test_cold_misses_count():
    """The first access to each sample is fetched, and counts, whatever the placement."""
    with icache(HighLow(start=0.5), room=2 * N) as store:
        store.places.array[::2] = LOW
        store.begin_epoch(0)
        for batch in np.random.default_rng(0).permutation(N).reshape(-1, 6):
            store.serve(batch, np.ones(6))
        stats = store.stats()
        assert stats["accesses"] == stats["fetched"] == N
        assert stats["hits"] == stats["substituted"] == 0
