"""The native arena against its plain-Python model, operation by operation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.arena import ReferenceArena

from stoker.errors import ConfigError
from stoker.policy.base import Region
from stoker.store.arena import Arena

NUM_IDS = 40
CAPACITY = 2000

REGION_SETS = {
    "key": (Region("main", 1.0),),
    "recency": (Region("main", 1.0, order="recency"),),
    "frequency": (Region("main", 1.0, order="frequency"),),
    "insertion": (Region("main", 1.0, order="insertion"),),
    "static": (Region("main", 1.0, order="insertion", admission="while_room"),),
    "score": (Region("main", 1.0, admission="beats_victims"),),
    "score, no ties": (Region("main", 1.0, admission="beats_victims", ties=False),),
    "sieve": (Region("main", 1.0, order="insertion", pop="sieve"),),
    "second chance": (Region("main", 1.0, order="insertion", pop="second_chance"),),
    "high, low and a queue": (
        Region("main", 0.5, admission="beats_victims"),
        Region("queue", 0.2, order="insertion"),
        Region("static", 0.3, order="key", admission="while_room"),
    ),
    "two strict": (
        Region("main", 0.6, admission="beats_victims"),
        Region("low", 0.4, order="recency"),
    ),
    "borrowing beside a window": (
        Region("main", 0.2, order="insertion", pop="promote", visits=1, promote_to="big",
               strict=False),
        Region("big", 0.5, order="recency", strict=False),
        Region("window", 0.3, order="insertion"),
    ),
    "s3fifo": (
        Region(
            "main", 0.2, order="insertion", pop="promote", visits=2, promote_to="big",
            ghost="ghost", strict=False,
        ),
        Region("big", 0.8, order="insertion", pop="second_chance", strict=False),
        Region("ghost", 0.5, order="insertion", holds_bytes=False),
    ),
}  # fmt: skip

some_id = st.integers(0, NUM_IDS - 1)
some_ids = st.lists(some_id, min_size=1, max_size=6, unique=True)
some_key = st.integers(-5, 5).map(float) | st.just(-np.inf)
operation = st.one_of(
    st.tuples(
        st.just("put"),
        st.lists(st.tuples(some_id, st.integers(0, 400), some_key), min_size=1, max_size=6),
        st.booleans(),
        st.booleans(),
    ),
    st.tuples(st.just("get"), some_ids),
    st.tuples(st.just("discard"), some_ids),
    st.tuples(st.just("claim"), some_ids),
    st.tuples(st.just("abandon"), some_ids),
    st.tuples(st.just("set_keys"), some_ids, some_key),
    st.tuples(st.just("move"), some_ids, st.booleans(), st.none() | some_key),
    st.tuples(st.just("divide"), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("lease"), some_ids),
    st.tuples(st.just("release")),
)


def sample(sample_id: int, length: int) -> bytes:
    return bytes((sample_id * 31 + i) % 256 for i in range(length))


def apply(arena: Arena | ReferenceArena, step: tuple, position: int, second: str | None) -> object:
    match step:
        case ("put", items, other, spare):
            ids = [i for i, _, _ in items]
            region = second if other and second else "main"
            overflow = second if spare and second else ""
            samples = [sample(i, length) for i, length, _ in items]
            keys = [key for _, _, key in items]
            return arena.put_many(ids, samples, keys, region, overflow).tolist()
        case ("get", ids):
            data, offsets, found = arena.get_many(ids)
            return data.tobytes(), offsets.tolist(), found.tolist()
        case ("claim", ids):
            return arena.claim(ids).tolist()
        case ("set_keys", ids, key):
            return arena.set_keys(ids, [key + n for n in range(len(ids))])
        case ("move", ids, other, key):
            region = second if other and second else "main"
            keys = None if key is None else [key + n for n in range(len(ids))]
            return arena.move(ids, region, keys).tolist()
        case ("divide", main, other):
            try:
                arena.divide({"main": main, second: other} if second else {"main": main})
            except ConfigError:
                return "refused"
        case ("lease", ids):
            arena.lease(ids, position)
        case ("release",):
            arena.release(position - 3)
        case (name, ids):
            getattr(arena, name)(ids)
    return None


@pytest.mark.parametrize("regions", REGION_SETS.values(), ids=REGION_SETS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(operation, max_size=60))
def test_same_as_the_model(regions: tuple[Region, ...], steps: list[tuple]) -> None:
    second = next((r.name for r in reversed(regions[1:]) if r.holds_bytes), None)
    with (
        Arena(NUM_IDS, CAPACITY, 40, exact=True) as native,
        ReferenceArena(NUM_IDS, CAPACITY, 40) as model,
    ):
        native.configure(regions)
        model.configure(regions)
        everything = np.arange(NUM_IDS)
        marks = np.arange(NUM_IDS, dtype=np.uint32) % 4
        held = [r.name for r in regions if r.holds_bytes]
        earlier = np.zeros((2, len(held), NUM_IDS), np.uint32)
        for position, step in enumerate(steps):
            got = apply(native, step, position, second)
            assert got == apply(model, step, position, second), step
            cached = native.contains(everything).tolist()
            assert cached == model.contains(everything).tolist(), step
            lacking = native.find_lacking(everything, marks, 2)
            assert lacking.tolist() == [n for n in everything if not cached[n] and marks[n] < 2]
            assert native.where(everything).tolist() == model.where(everything).tolist(), step
            copies = np.array([[a.copies(everything, r) for r in held] for a in (native, model)])
            assert ((copies[0] > 0) == (copies[1] > 0)).all(), step
            assert ((copies[0] > earlier[0]) == (copies[1] > earlier[1])).all(), step
            earlier = np.maximum(earlier, copies)  # one that comes back has a higher number
            assert [native.list(r).tolist() for r in held] == [model.list(r).tolist() for r in held]
            native.verify()
        by_name = native.stats()["regions"]
        assert by_name == model.stats()["regions"]
        assert by_name == {r.name: native.region_stats(r.name) for r in regions}
        native_counts, model_counts = native.stats(), model.stats()
        for name in ("hits", "misses", "inserts", "evictions"):
            assert native_counts[name] == model_counts[name], name
