"""An arena without bytes: what it counts, and its runs, against arenas with bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.arena import ReferenceArena

from stoker import policy as policies
from stoker.errors import ConfigError, SegmentError
from stoker.policy import Region
from stoker.policy.base import Substitution
from stoker.scores import Scores
from stoker.sim.blank import AccountingArena, BlankSource
from stoker.store import MemoryTier
from stoker.store.arena import Arena
from stoker.store.store import Store
from stoker.store.substitutes import ByNeighbour, StandIns
from stoker.types import Outcome

NUM_IDS, CAPACITY = 40, 1000

RULES: dict[str, tuple[Region, ...]] = {
    "lru": policies.LRU().regions(),
    "lfu": policies.LFU().regions(),
    "fifo": policies.FIFO().regions(),
    "random": policies.Random().regions(),
    "minio": policies.MinIO().regions(),
    "sieve": policies.Sieve().regions(),
    "s3fifo": policies.S3FIFO().regions(),
    "score": policies.Score().regions(),
    "strict score": policies.Score(ties=False).regions(),
    "two regions": (
        Region("H", 0.6, admission="beats_victims"),
        Region("L", 0.4, admission="while_room"),
    ),
}


def accesses(rng: np.random.Generator, count: int) -> tuple[Any, Any, Any]:
    """Return ids, keys and places of skewed accesses."""
    ids = np.minimum(rng.integers(0, NUM_IDS, count), rng.integers(0, NUM_IDS, count))
    return ids.astype(np.uint32), rng.integers(0, 9, count).astype(float), rng.integers(0, 2, count)


def in_steps(arena, ids, lengths, keys, after, places, regions, at_once):
    """Do what a store does with each batch, by the arena's own calls; return which hit."""
    hits = np.zeros(len(ids), np.bool_)
    for start in range(0, len(ids), at_once):
        batch = slice(start, start + at_once)
        some, order = ids[batch], keys[batch]
        found = arena.get_many(some)[2]
        if after is None and found.any():
            arena.set_keys(some[found], order[found])
        missed = np.flatnonzero(~found)
        first = np.sort(missed[np.unique(some[missed], return_index=True)[1]])
        hits[batch] = True
        hits[start + first] = False
        arena.claim(some[first])
        targets = np.zeros(len(first), int) if places is None else places[batch][first]
        for target in np.unique(targets).tolist():
            put = first[targets == target]
            samples = [bytes(int(lengths[i])) for i in some[put]]
            arena.put_many(some[put], samples, order[put], regions[target].name)
        if after is not None:
            arena.set_keys(some, after[batch])
    return hits


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(RULES)),
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
)
def test_a_run_is_the_same_as_its_steps(name, seed, at_once, follows, reference):
    regions, rng = RULES[name], np.random.default_rng(seed)
    ids, keys, places = accesses(rng, 400)
    lengths = rng.integers(0, 60, NUM_IDS)
    after = keys[::-1].copy() if follows else None
    if name != "two regions":
        places = None
    counting = AccountingArena(lengths, CAPACITY, seed=3)
    if reference and name != "random":  # which draws as it likes
        stepwise = ReferenceArena(NUM_IDS, CAPACITY, float(lengths.mean()))
    else:
        stepwise = Arena(NUM_IDS, CAPACITY, float(lengths.mean()), exact=True, seed=3)
    with counting, stepwise:
        for arena in (counting, stepwise):
            arena.configure(regions)
        hits = counting.replay(
            ids,
            keys,
            after=after,
            regions=None if places is None else places.astype(np.uint8),
            entrance=regions[0].name,
            at_once=at_once,
        )
        expected = in_steps(stepwise, ids, lengths, keys, after, places, regions, at_once)
        assert hits.tolist() == expected.tolist()
        every = np.arange(NUM_IDS, dtype=np.uint32)
        assert counting.contains(every).tolist() == stepwise.contains(every).tolist()
        assert counting.where(every).tolist() == stepwise.where(every).tolist()
        counting.verify()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.booleans(), st.booleans())
def test_a_batch_with_stand_ins_is_the_same_as_what_a_store_serves(seed, size, equal, scored):
    rng, policy, scores = np.random.default_rng(seed), policies.Homophily(0.7, 0.2), Scores(NUM_IDS)
    regions = policy.regions()
    lengths = np.full(NUM_IDS, 50) if equal else rng.integers(1, 100, NUM_IDS)
    names = [region.name for region in regions]
    quick, slow = (AccountingArena(lengths, CAPACITY, seed=3) for _ in range(2))
    tables = [StandIns.create(NUM_IDS) for _ in range(2)]
    with quick, slow:
        for arena in (quick, slow):
            arena.configure(regions)
        tiers = [MemoryTier(a, names[0], regions=names, overflow="transit") for a in (quick, slow)]
        chosen = [
            ByNeighbour(tier, "homophily", table) for tier, table in zip(tiers, tables, strict=True)
        ]
        store = Store(
            BlankSource(lengths),
            tiers[1],
            substitution=Substitution("neighbour", "homophily"),
            stand_ins=tables[1],
            follows_scores=True,
        )
        for _ in range(40):
            ids, keys, _ = accesses(rng, size)
            if scored:
                keys = policy.keys(ids, scores, None, None)
            served, hits = quick.replay_batch(
                ids,
                scores if scored else keys,
                tables[0].serves.array,
                "homophily",
                entrance=names[0],
                overflow="transit",
            )
            expected = store.serve(ids, keys)
            assert served.tolist() == expected.ids.tolist()
            assert hits.tolist() == (expected.outcomes != Outcome.FETCHED).tolist()
            degrees = rng.integers(0, 5, size)
            near = rng.integers(0, NUM_IDS, (size, 4)).astype(np.uint32)
            scores.update(served, rng.integers(0, 9, size), 0)
            keys_kept = {by.keep(served, degrees, near.__getitem__) for by in chosen}
            assert len(keys_kept) == 1
            every = np.arange(NUM_IDS, dtype=np.uint32)
            assert quick.where(every).tolist() == slow.where(every).tolist()
        quick.verify()


def test_lengths_count_and_bytes_are_none():
    lengths = np.arange(10) * 100
    with AccountingArena(lengths, 1000) as arena:
        kept = arena.put_many(np.array([9]))
        assert arena.stats()["payload_bytes"] == 900
        kept = arena.put_many(np.array([3, 2]))
        data, offsets, found = arena.get_many(np.array([9, 3, 2]))
        assert kept.all()
        assert found.tolist() == [False, True, True]  # 900 had to leave for 300
        assert not data.size
        assert offsets.tolist() == [0, 0, 0, 0]
        assert arena.stats()["payload_bytes"] == 500


def test_terabytes_take_no_memory():
    with AccountingArena(np.full(1000, 1 << 30), 1 << 39) as arena:
        kept = arena.put_many(np.arange(1000, dtype=np.uint32))
        assert kept.all()
        assert arena.stats()["entries"] == 512


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="are invalid"):
        AccountingArena(np.array([1, -1]), 100)
    with pytest.raises(ConfigError, match="are invalid"):
        AccountingArena(np.empty(0, np.int64), 100)
    ids = np.array([1, 2], np.uint32)
    with AccountingArena(np.full(10, 5), 100) as arena:
        for call in (
            lambda: arena.replay(np.array([10], np.uint32)),
            lambda: arena.replay(ids, np.zeros(1)),
            lambda: arena.replay(ids, after=np.zeros(3)),
            lambda: arena.replay(ids, regions=np.zeros(1, np.uint8)),
            lambda: arena.replay(ids, at_once=0),
            lambda: arena.replay(ids, entrance="nowhere"),
            lambda: arena.replay_batch(ids, None, np.zeros(9, np.uint64), "main"),
            lambda: arena.replay_batch(ids, None, np.zeros(10, np.uint64), "nowhere"),
            lambda: arena.replay_batch(ids, np.zeros(1), np.zeros(10, np.uint64), "main"),
            lambda: arena.replay_batch(ids, Scores(9), np.zeros(10, np.uint64), "main"),
        ):
            with pytest.raises(ConfigError):
                call()
        with pytest.raises(SegmentError):
            Arena.attach(arena.handle)
    with pytest.raises(SegmentError, match="closed"):
        arena.replay(ids)
