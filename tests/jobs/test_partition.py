"""A cache whose memory jobs divide by weights: beside a simple model, and by real jobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from stoker import Cache, Feed
from stoker.errors import ConfigError
from stoker.jobs import Sharing
from stoker.jobs.partition import EVERY, IDLE, PARTS, Partition, fair_shares
from stoker.policy.base import Region
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.testing.sources import SlowSource

NUM, SIZE, ROOM = 4_000, 100, 1_000
RULES = Region("main", 1.0, order="recency")
SAMPLE = bytes(SIZE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(NUM, ROOM * SIZE, SIZE) as arena:
        arena.configure([RULES])
        yield arena


class Jobs:
    """Jobs at one arena that read samples at random, in a time of their own."""

    def __init__(self, arena: Arena, weights: list[float]) -> None:
        self.arena, self.now = arena, 100.0
        self.rng = np.random.default_rng(0)
        self.parts = [
            Partition("test", arena, RULES, token, weight, lambda: self.now)
            for token, weight in enumerate(weights, 1)
        ]

    def run(self, seconds: float, readers: list[int], batch: int = 120) -> None:
        """Let ``readers`` read a batch each in turn, ten a second."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for reader in readers:
                ids = np.unique(self.rng.integers(0, NUM, batch)).astype(np.uint32)
                missing = ids[~self.arena.contains(ids)]
                region = self.parts[reader].region
                self.arena.put_many(missing, [SAMPLE] * len(missing), region=region)
                self.parts[reader].seen()

    def shares(self) -> np.ndarray:
        """Return what each has of the cache."""
        regions = self.arena.stats()["regions"]
        held = np.array([regions[part.region]["bytes"] for part in self.parts])
        return held / (ROOM * SIZE)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@pytest.fixture
def four(arena: Arena) -> Iterator[Jobs]:
    jobs = Jobs(arena, [4, 2, 1, 1])
    yield jobs
    jobs.close()
    arena.verify()


def test_parts_are_as_weights_are(four: Jobs) -> None:
    four.run(10, [0, 1, 2, 3])
    assert four.shares() == pytest.approx([0.5, 0.25, 0.125, 0.125], rel=0.05)


def test_an_idle_jobs_part_is_used_within_two_seconds_and_back_within_five(four: Jobs) -> None:
    four.run(10, [0, 1, 2, 3])
    four.run(2, [1, 2, 3])
    assert four.shares()[1:].sum() > 0.95 - 0.03
    assert four.shares()[1:] == pytest.approx([0.5, 0.25, 0.25], rel=0.1)
    four.run(5, [0, 1, 2, 3])
    assert four.shares() == pytest.approx([0.5, 0.25, 0.125, 0.125], rel=0.05)


def test_what_is_idle_stays_as_long_as_no_other_job_needs_the_room(four: Jobs) -> None:
    four.run(10, [0])
    assert four.shares()[0] > 0.9
    four.now += 10 * IDLE
    four.run(1, [3], batch=1)
    assert four.shares()[0] > 0.85
    four.run(5, [3])
    assert four.shares()[3] > 0.9


def test_a_part_that_is_not_filled_is_used_by_the_others(arena: Arena) -> None:
    jobs = Jobs(arena, [4, 1])
    few = np.arange(100, dtype=np.uint32)
    for _ in range(100):
        missing = few[~arena.contains(few)]
        arena.put_many(missing, [SAMPLE] * len(missing), region=jobs.parts[0].region)
        jobs.run(0.1, [1])
        jobs.parts[0].seen()
    assert jobs.shares()[0] <= 0.11
    assert jobs.shares().sum() > 0.93
    jobs.close()


def test_ranks_of_a_job_have_one_part_and_jobs_without_one_have_the_rest(arena: Arena) -> None:
    jobs = Jobs(arena, [1.0] * PARTS)
    again = Partition("test", arena, RULES, 1, 1.0, lambda: jobs.now)
    assert again.region == jobs.parts[0].region
    late = Partition("test", arena, RULES, 99, 1.0, lambda: jobs.now)
    assert late.region == "main"
    jobs.parts.append(late)
    jobs.run(12, list(range(PARTS + 1)))
    assert jobs.shares() == pytest.approx([1 / (PARTS + 1)] * (PARTS + 1), rel=0.15)
    jobs.now += 50
    jobs.run(11, [n for n in range(PARTS + 1) if n != 3], batch=1)
    taken = Partition("test", arena, RULES, 100, 1.0, lambda: jobs.now)
    assert taken.region == jobs.parts[3].region
    for part in (again, taken):
        part.close()
    jobs.close()


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.one_of(st.just(0.0), st.floats(0.1, 1e4))),
        min_size=1,
        max_size=12,
    ),
    st.floats(1, 1e4),
)
def test_shares_are_those_of_pouring_drop_by_drop(
    jobs: list[tuple[float, float]], capacity: float
) -> None:
    weights, demands = np.array(jobs).T
    shares = fair_shares(weights, demands, capacity)
    # The model: a level per weight that rises until the capacity is used up or no one wants more.
    low, high = 0.0, float((demands / weights).max())
    for _ in range(200):
        middle = (low + high) / 2
        fits = np.minimum(demands, middle * weights).sum() <= capacity
        low, high = (middle, high) if fits else (low, middle)
    assert shares == pytest.approx(np.minimum(demands, high * weights), rel=1e-6, abs=1e-6)
    assert shares.sum() == pytest.approx(min(capacity, demands.sum()))


def test_real_jobs_have_parts_by_weight() -> None:
    is_over = threading.Event()

    def train(feed: Feed) -> None:
        with feed:
            while not is_over.is_set():
                for _ in feed:
                    if is_over.is_set():
                        break

    rng = np.random.default_rng(0)
    source = SlowSource(MemorySource([rng.bytes(SIZE) for _ in range(NUM)]), latency=0.0, tail=0.0)
    feeds = [
        Feed(
            source,
            20,
            cache=Cache("25%", sharing=Sharing(f"{w}", weight=w, by_weight=True)),
            recipe="lru",
            seed=seed,
            decode_threads=1,
        )
        for seed, w in enumerate([3, 1])
    ]
    jobs = [threading.Thread(target=train, args=(feed,)) for feed in feeds]
    for job in jobs:
        job.start()

    def are_divided() -> bool:
        parts = [feed._session.setup.partition for feed in feeds]
        cached = feeds[0]._session.cached
        if None in parts or cached is None:
            return False
        regions = cached.store.tier.stats()["regions"]
        held = [regions[part.region]["bytes"] for part in parts]
        return sum(held) > 0.9 * NUM * SIZE / 4 and 2.85 < held[0] / held[1] < 3.15

    try:
        until(are_divided)
    finally:
        is_over.set()
        for job in jobs:
            job.join()


def test_what_cannot_be_divided_is_refused(tmp_path) -> None:
    source = MemorySource([SAMPLE] * 10)
    cache = Cache("50%", sharing=Sharing(by_weight=True))
    with pytest.raises(ConfigError, match=r"one region.*'s3fifo'"):
        Feed(source, 2, cache=cache, recipe="s3fifo")
    disk = Cache("50%", disk=tmp_path / "disk", sharing=Sharing(by_weight=True))
    with pytest.raises(ConfigError, match="no disk cache"):
        Feed(source, 2, cache=disk)
    with pytest.raises(ConfigError, match="by_weight=1"):
        Sharing(by_weight=1)
    assert EVERY < IDLE
