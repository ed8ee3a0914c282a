"""What the fetcher claims, reads and publishes, step by step."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.waiting import until

from stoker.errors import SampleCorrupt, SourceUnavailable
from stoker.node.bandwidth import FetchShare
from stoker.policy.base import Region
from stoker.prefetch.fetcher import Fetcher
from stoker.prefetch.lanes import ConcurrencyLimit
from stoker.prefetch.walk import SERVED, STARTED, Blocks, Marks, Segment, Walk
from stoker.source.base import Multiplexer, PackedRead, Room
from stoker.source.held import MemorySource
from stoker.source.packed import Buffer, Packed, pack
from stoker.store.arena import Arena
from stoker.store.flight import Meter
from stoker.store.memory_tier import MemoryTier
from stoker.store.substitutes import ByNeighbour, StandIns
from stoker.testing.sources import SlowSource

NUM = 20
SAMPLES = [bytes([i]) * 100 for i in range(NUM)]


class OvertakenTier(MemoryTier):
    """A tier where a worker gets to some samples between the look at the plan and the claim."""

    marks: Marks
    overtaken: tuple[int, ...] = ()

    def claim(self, ids: np.ndarray) -> np.ndarray:
        self.marks.served[list(self.overtaken)] = STARTED
        return super().claim(ids)


class Rank:
    """What the fetcher knows of a rank that walks the samples in order."""

    def __init__(self, arena: Arena, window_bytes: int) -> None:
        self.marks = Marks(np.zeros(Marks.bytes(NUM), np.uint8))
        self.marks.begin(0.0)
        self.tier = OvertakenTier(arena)
        self.tier.marks = self.marks
        self.walk = Walk(np.full(NUM, 100), window_bytes, reach_bytes=1_400)
        self.walk.add(Segment(0, np.arange(NUM, dtype=np.uint32), None, self.marks, 1))
        self.fresh = np.zeros(NUM, np.uint8)
        self.totals = np.zeros(3)
        self.meter = Meter(self.totals)
        self.ready: deque = deque()
        self.spared: deque = deque()
        self.stand_ins: ByNeighbour | None = None
        self.fetch_share = FetchShare(0)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(NUM, 1_400, 100) as arena:
        main = Region("main", 400 / 1_400, order="insertion", admission="while_room")
        arena.configure([main, Region("window", 1_000 / 1_400, order="insertion")])
        yield arena


class OneByOne(SlowSource):
    """Read by threads, sample by sample."""

    @property
    def lanes(self) -> int:
        return 4


class ManyAtOnce(OneByOne):
    """Read in one thread, which leaves every third sample to the others."""

    def multiplexer(self) -> Multiplexer:
        return Multiplexed(self)


class Multiplexed:
    """Gives samples as bytes, and not in the rooms that they have."""

    def __init__(self, source: ManyAtOnce) -> None:
        self._source = source
        self._pieces: list[tuple[int, Any]] = []

    def start(self, pieces: Sequence[tuple[int, Any]], rooms: Sequence[Room | None]) -> None:
        assert None not in rooms
        self._pieces += pieces

    def wait(self, seconds: float) -> list[tuple[Any, Buffer | None]]:
        pieces, self._pieces = self._pieces, []
        return [
            (ticket, None if sample % 3 == 0 else self._source.read_one(sample))
            for sample, ticket in pieces
        ]

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(params=[SlowSource, OneByOne, ManyAtOnce])
def source(request: pytest.FixtureRequest) -> SlowSource:
    made: SlowSource = request.param(MemorySource(SAMPLES), latency=0.001)
    return made


def run(fetcher: Fetcher, *ranks: Rank) -> list[int]:
    """Let the fetcher do what there is to do; return what is cached then."""

    def has_nothing_to_do() -> bool:
        fetcher.step(ranks)
        return fetcher.is_idle

    until(has_nothing_to_do)
    return np.flatnonzero(ranks[0].tier.arena.contains(np.arange(NUM, dtype=np.uint32))).tolist()


def test_it_fills_the_window_and_no_more(arena: Arena, source: SlowSource) -> None:
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    assert run(fetcher, rank) == list(range(10))
    assert rank.fresh.tolist() == [1] * 10 + [0] * 10
    assert rank.marks.handed_out == 10
    rank.marks.served[:10] = SERVED
    # The cache keeps the first four, the window gives up the others.
    assert run(fetcher, rank) == [0, 1, 2, 3, *range(10, 20)]
    assert source.reads.tolist() == [1] * NUM
    fetcher.close()


def test_what_a_worker_overtakes_is_left_to_it(arena: Arena, source: SlowSource) -> None:
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    rank.tier.overtaken = (1, 5, 9)
    # 1 was handed out before it was overtaken; the others take up no room of the window.
    assert run(fetcher, rank) == [0, 2, 3, 4, 6, 7, 8, 10, 11]
    assert source.reads[[1, 5, 9]].tolist() == [0, 0, 0]
    left = np.array([1, 5, 9], np.uint32)
    assert arena.claim(left).all()  # and nobody has a claim on it
    fetcher.close()


def test_a_run_of_hits_does_not_fill_the_window(arena: Arena, source: SlowSource) -> None:
    rank, fetcher = Rank(arena, 300), Fetcher(source, ConcurrencyLimit(1, 1))
    cached = np.arange(4, dtype=np.uint32)
    assert rank.tier.put_many(cached, Packed(*pack(SAMPLES[:4])), None).all()
    assert run(fetcher, rank) == [0, 1, 2, 3, 4, 5, 6]
    assert rank.walk.held == 300
    assert source.reads[:4].tolist() == [0] * 4
    fetcher.close()


def test_what_vanishes_far_off_is_left_to_the_worker(arena: Arena, source: SlowSource) -> None:
    """It has no lease: read now, it might be gone again before its access, and read in vain."""
    rank, fetcher = Rank(arena, 300), Fetcher(source, ConcurrencyLimit(1, 1))
    cached = np.arange(6, dtype=np.uint32)
    assert rank.tier.put_many(cached, Packed(*pack(SAMPLES[:6])), None, "window").all()
    lease = arena.lease

    def overtaken(ids: np.ndarray, position: int) -> bool:
        if position == 5:
            arena.discard(cached[5:])
        return lease(ids, position)

    arena.lease = overtaken  # type: ignore[method-assign]
    assert run(fetcher, rank) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert source.reads[5] == 0
    fetcher.close()


def test_what_others_claimed_is_left_to_them(arena: Arena, source: SlowSource) -> None:
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    other = Arena.attach(arena.handle)
    assert other.claim(np.array([3, 4], np.uint32)).all()
    assert run(fetcher, rank) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert source.reads[[3, 4]].tolist() == [0, 0]
    other.close()
    fetcher.close()


def test_what_another_rank_still_waits_for_takes_up_its_room(source: SlowSource) -> None:
    with Arena(NUM, 1_050, 100) as arena, Arena.attach(arena.handle) as other:
        nothing = Region("main", 50 / 1_050, order="insertion", admission="while_room")
        arena.configure([nothing, Region("window", 1_000 / 1_050, order="insertion")])
        ranks, fetcher = [Rank(arena, 500), Rank(other, 500)], Fetcher(source)
        run(fetcher, ranks[0])
        assert run(fetcher, *ranks) == list(range(5)), "the second waits for the same ones"
        ranks[0].marks.served[:5] = SERVED
        assert run(fetcher, *ranks) == list(range(10))
        ranks[0].marks.served[:10] = SERVED
        assert run(fetcher, *ranks) == [*range(5), *range(10, 15)]
        for end in (5, 10, 15, 20):
            for rank in ranks:
                rank.marks.served[:end] = SERVED
            run(fetcher, *ranks)
        read_for = np.add(ranks[0].fresh, ranks[1].fresh)
        assert read_for.tolist() == source.reads.tolist(), "none was read in vain"
        fetcher.close()


def test_s7_who_has_a_stand_in_is_read_once_that_has_left(arena: Arena, source: SlowSource) -> None:
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    key = np.array([19], np.uint32)
    rank.tier.put_many(key, Packed(*pack(SAMPLES[19:])), None)
    rank.stand_ins = ByNeighbour(rank.tier, "main", StandIns.create(NUM))
    near = np.array([2, 3, 7], np.uint32)
    arena.move(key, "window")
    assert rank.stand_ins.keep(key, np.array([3]), lambda _: near) == 19
    others = [i for i in range(13) if i not in (2, 3, 7)]
    assert run(fetcher, rank) == [*others, 19], "they take up no room of the window"
    assert (sum(len(group.ids) for group in rank.spared), rank.walk.held) == (3, 1_000)
    rank.marks.served[:3] = SERVED  # the first of them was served by its stand-in
    arena.discard(key)
    until_read(fetcher, rank, [3, 7])
    assert source.reads[[2, 3, 7, 19]].tolist() == [0, 1, 1, 0]
    rank.marks.served[:10] = SERVED
    run(fetcher, rank)
    assert not rank.spared
    fetcher.close()


def until_read(fetcher: Fetcher, rank: Rank, ids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not rank.tier.arena.contains(ids).all() and time.monotonic() < deadline:
        run(fetcher, rank)
    assert rank.tier.arena.contains(ids).all()


class Failing(OneByOne):
    """Samples 2 and 5 cannot be read, the latter because the storage is away."""

    def read_one(self, sample_id: int) -> bytes:
        if sample_id == 2:
            raise SampleCorrupt("sample 2 is cut", [2])
        if sample_id == 5:
            raise SourceUnavailable("away", [5])
        return super().read_one(sample_id)


def test_what_cannot_be_read_one_by_one_is_left_to_the_worker(arena: Arena) -> None:
    source = Failing(MemorySource(SAMPLES), latency=0.001)
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    assert run(fetcher, rank)[:4] == [0, 1, 3, 4]
    fetcher.step([rank])
    assert fetcher.is_idle, "it pauses after a storage that gave up"
    until_read(fetcher, rank, [6, 7, 8, 9])
    assert arena.claim(np.array([2, 5], np.uint32)).all()
    assert rank.fresh[[2, 5]].tolist() == [0, 0]
    fetcher.close()


class Gated(OneByOne):
    """No sample comes before the gate opens."""

    gate: threading.Event

    def read_one(self, sample_id: int) -> bytes:
        assert self.gate.wait(30)
        return super().read_one(sample_id)


def test_a_rank_that_leaves_while_its_samples_come_disturbs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Gated(MemorySource(SAMPLES), latency=0.0)
    source.gate = threading.Event()
    regions = [Region("main", 0.5, admission="while_room"), Region("window", 0.5)]
    with Arena(NUM, 1_000, 100) as left, Arena(NUM, 1_000, 100) as kept:
        left.configure(regions)
        kept.configure(regions)
        leaving, staying = Rank(left, 1_000), Rank(kept, 1_000)
        fetcher = Fetcher(source, ConcurrencyLimit(4, 4))
        fetcher.step([leaving])
        leaving.tier.close()
        source.gate.set()
        assert run(fetcher, staying) == list(range(10))
        fetcher.close()
    assert not [record for record in caplog.records if record.levelname != "INFO"]


class Odd(SlowSource):
    """A read that includes sample 2 raises what no source should."""

    def read_packed(self, ids: np.ndarray) -> PackedRead:
        if 2 in np.asarray(ids):
            raise RuntimeError("odd")
        return super().read_packed(ids)


def test_reads_resume_after_an_error_that_no_source_should_raise(arena: Arena) -> None:
    source = Odd(MemorySource(SAMPLES), latency=0.001)
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    found = run(fetcher, rank)
    assert 2 not in found and 9 in found, "the thread has not ended with it"
    assert arena.claim(np.array([2], np.uint32)).all()
    fetcher.close()


def test_samples_read_one_by_one_are_counted_with_the_time_of_the_reads(arena: Arena) -> None:
    source = OneByOne(MemorySource(SAMPLES), latency=0.01, tail=0.0)
    rank, fetcher = Rank(arena, 1_000), Fetcher(source, ConcurrencyLimit(1, 1))
    run(fetcher, rank)
    assert rank.totals[0] == 10
    assert 0.1 <= rank.totals[1] < 1.0
    fetcher.close()


class Counting(SlowSource):
    """Counts reads of many."""

    packed: list[list[int]]

    def read_packed(self, ids: np.ndarray) -> PackedRead:
        self.packed.append(np.asarray(ids).tolist())
        return super().read_packed(ids)


def test_a_block_is_read_at_once_and_kept_where_the_policy_has_room() -> None:
    source = Counting(MemorySource(SAMPLES), latency=0.0)
    source.packed = []
    with Arena(NUM, 1_200, 100) as arena:
        main = Region("main", 0.5, order="key", admission="beats_victims", ties=False)
        arena.configure([main, Region("window", 0.5, order="insertion")])
        rank = Rank(arena, 400)
        ids = np.arange(NUM, dtype=np.uint32)
        # Accesses 0, 4, 8, ... are of block 0, 1, 5, 9, ... of block 1, and so on.
        before = -np.arange(NUM, dtype=np.float64)
        blocks = Blocks(ids % 4, before)
        rank.walk.reset()
        rank.walk.add(Segment(0, ids, np.full(NUM, -100.0), rank.marks, 1, blocks))
        fetcher = Fetcher(source, ConcurrencyLimit(1, 1))
        cached = run(fetcher, rank)
        assert sorted(source.packed[0]) == [0, 4, 8, 12, 16]
        assert {0, 1, 2, 3, 4} <= set(cached)
        assert rank.fresh[cached].all()
        # Early ones never take up the window, which has room for those that are next.
        assert set(arena.list("window").tolist()) <= {0, 1, 2, 3}
        arena.verify()
        fetcher.close()
