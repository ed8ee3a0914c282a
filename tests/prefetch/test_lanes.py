"""Threads that take pieces of work: which, how many at once, and when more is called for."""

import select
import threading
import time
from collections.abc import Callable

import pytest
from support.waiting import until

from stoker.prefetch.lanes import ConcurrencyLimit, Lanes


class Counted:
    """Work that says what was done with it, and waits in each piece until it may go on."""

    def __init__(self, num_pieces: int, may_go_on: threading.Event, is_fine: bool = True) -> None:
        self.num_pieces = num_pieces
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.finished: list[int] = []
        self._may_go_on, self._is_fine = may_go_on, is_fine

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
