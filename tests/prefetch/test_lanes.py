"""Threads that take pieces of work: which, how many at once, and when more is called for."""

import select
import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import until

from stoker.prefetch.lanes import ConcurrencyLimit, Lanes
from stoker.source.base import Room
from stoker.source.packed import Buffer


class Counted:
    """Work that says what was done with it, and waits in each piece until it may go on."""

    def __init__(self, num_pieces: int, may_go_on: threading.Event, is_fine: bool = True) -> None:
        self.num_pieces = num_pieces
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.finished: list[int] = []
        self._may_go_on, self._is_fine = may_go_on, is_fine

    def begin(self, piece: int) -> int | None:
        return None

    def room(self, piece: int) -> None:
        pass

    def keep(self, piece: int, buffer: Buffer) -> int:
        raise AssertionError("no piece is a sample")

    def read(self, piece: int) -> int:
        self.begun.append(piece)
        assert self._may_go_on.wait(30)
        self.ended.append(piece)
        return 100

    def finish(self) -> bool:
        self.finished.append(len(self.ended))
        return self._is_fine


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def is_readable(lanes: Lanes) -> bool:
    poll = select.poll()
    poll.register(lanes.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def idle(lanes: Lanes) -> Callable[[], bool]:
    return lambda: lanes.is_idle


def test_each_piece_is_read_once_and_each_work_finished_after_its_last(
    gate: threading.Event,
) -> None:
    gate.set()
    lanes = Lanes(ConcurrencyLimit(3, 8), ahead=1)
    works = [Counted(1 + number % 5, gate) for number in range(200)]
    for work in works:
        lanes.add(work)
    until(idle(lanes))
    for work in works:
        assert sorted(work.ended) == list(range(work.num_pieces))
        assert work.finished == [work.num_pieces]
    lanes.close()


def test_as_many_read_at_once_as_the_limit_says(gate: threading.Event) -> None:
    lanes = Lanes(ConcurrencyLimit(3, 3))
    work = Counted(10, gate)
    lanes.add(work)
    until(lambda: len(work.begun) == 3)
    time.sleep(0.05)
    assert sorted(work.begun) == [0, 1, 2]
    gate.set()
    until(idle(lanes))
    assert sorted(work.ended) == list(range(10))
    lanes.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_it_calls_for_more_when_it_turned_work_away_and_can_take_it_now(
    gate: threading.Event, ahead: int
) -> None:
    lanes = Lanes(ConcurrencyLimit(2, 2), ahead)
    works = [Counted(1, gate) for _ in range(2 * (1 + ahead))]
    for work in works:
        assert lanes.has_room
        lanes.add(work)
    assert not lanes.has_room
    assert not is_readable(lanes)
    gate.set()
    until(lambda: is_readable(lanes))
    until(idle(lanes))
    lanes.hear()
    assert not is_readable(lanes)
    assert lanes.has_room
    lanes.add(Counted(1, gate))
    until(idle(lanes))
    assert not is_readable(lanes), "no work was turned away"
    lanes.close()


def test_a_storage_that_gave_up_is_told_of_once_and_asked_for_less(gate: threading.Event) -> None:
    gate.set()
    limit = ConcurrencyLimit(2, 64, first=16)
    lanes = Lanes(limit)
    lanes.add(Counted(1, gate, is_fine=False))
    until(idle(lanes))
    assert limit.limit == 8
    assert (lanes.has_failed, lanes.has_failed) == (True, False)
    lanes.close()


def test_closing_begins_no_more_pieces(gate: threading.Event) -> None:
    lanes = Lanes(ConcurrencyLimit(1, 1))
    work = Counted(3, gate)
    lanes.add(work)
    until(lambda: work.begun == [0])
    lanes.close()
    gate.set()
    until(lambda: work.ended == [0])
    time.sleep(0.05)
    assert work.begun == [0]


class Samples(Counted):
    """Work whose pieces are samples, numbered from ``first`` on."""

    def __init__(self, first: int, num_pieces: int, may_go_on: threading.Event) -> None:
        super().__init__(num_pieces, may_go_on)
        self._first = first
        self.kept: dict[int, bytes] = {}

    def begin(self, piece: int) -> int | None:
        return self._first + piece

    def room(self, piece: int) -> None:
        pass

    def keep(self, piece: int, buffer: Buffer) -> int:
        assert piece not in self.kept
        self.kept[piece] = bytes(buffer)
        return len(buffer)


class Scripted:
    """A multiplexer of samples that are their number; it does not get some, and breaks at one."""

    def __init__(self, lacks: Set[int] = frozenset(), breaks_at: int = -1) -> None:
        self._lacks, self._breaks_at = lacks, breaks_at
        self._under_way: list[tuple[int, Any]] = []
        self._called = threading.Event()
        self.most = 0
        self.threads: set[int] = set()
        self.is_closed = False

    def start(self, pieces: Sequence[tuple[int, Any]], rooms: Sequence[Room | None]) -> None:
        assert rooms == [None] * len(pieces)
        self.threads.add(threading.get_ident())
        self._under_way += pieces
        self.most = max(self.most, len(self._under_way))
        if any(sample == self._breaks_at for sample, _ in pieces):
            raise RuntimeError("broken")

    def wait(self, seconds: float) -> list[tuple[Any, Buffer | None]]:
        self.threads.add(threading.get_ident())
        if not self._under_way:
            self._called.wait(seconds)
        self._called.clear()
        half = -(-len(self._under_way) // 2)
        done, self._under_way = self._under_way[-half:], self._under_way[:-half]
        return [
            (ticket, None if sample in self._lacks else b"%d" % sample) for sample, ticket in done
        ]

    def wake(self) -> None:
        self._called.set()

    def close(self) -> None:
        self.is_closed = True


@given(st.data())
@settings(max_examples=60)
def test_each_sample_comes_once_by_the_multiplexer_or_by_a_thread(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
    number = sum(lengths)
    lacks = data.draw(st.sets(st.integers(0, number - 1)))
    breaks_at = data.draw(st.sampled_from((-1, *range(number))))
    gate = threading.Event()
    gate.set()
    multiplexer = Scripted(lacks, breaks_at)
    lanes = Lanes(ConcurrencyLimit(2, 8), ahead=1, multiplexer=multiplexer)
    works: list[Samples] = []
    for length in lengths:
        works.append(Samples(sum(work.num_pieces for work in works), length, gate))
        lanes.add(works[-1])
        if data.draw(st.booleans()):
            lanes.add(Counted(1, gate))
    until(idle(lanes))
    lanes.close()
    first = 0
    for work in works:
        assert sorted([*work.kept, *work.ended]) == list(range(work.num_pieces))
        assert work.finished == [len(work.ended)]
        for piece, buffer in work.kept.items():
            assert buffer == b"%d" % (first + piece)
            assert first + piece not in lacks
        if breaks_at < 0:
            assert {first + piece for piece in work.ended} <= lacks
        first += work.num_pieces
    assert multiplexer.most <= 8
    assert len(multiplexer.threads) <= 1


def test_the_multiplexer_stays_within_the_limit_and_ends_with_the_lanes() -> None:
    gate = threading.Event()
    gate.set()
    multiplexer = Scripted()
    lanes = Lanes(ConcurrencyLimit(3, 3), multiplexer=multiplexer)
    lanes.add(work := Samples(0, 50, gate))
    until(idle(lanes))
    assert len(work.kept) == 50
    assert not work.begun
    assert multiplexer.most <= 3
    assert not multiplexer.is_closed
    lanes.close()
    until(lambda: multiplexer.is_closed)
