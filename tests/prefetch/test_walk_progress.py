"""Workers that leave the reading to a prefetch process that gets on."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from stoker.prefetch import walk
from stoker.prefetch.walk import SERVED, STARTED, Marks, Progress


class Cold:
    """A source that is not opened yet."""

    is_ready = False


@contextmanager
def prefetching(marks: Marks, *ends: int) -> Iterator[None]:
    """Be a prefetch process that gets as far as each of ``ends``, a while after the one before."""
    stop = threading.Event()

    def live() -> None:
        for end in ends:
            for _ in range(5):
                marks.attend()
                if stop.wait(0.02):
                    return
            marks.hand_out(end)
        while not stop.wait(0.1):
            marks.attend()

    marks.attend()
    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def start(own: Progress, end: int, alone: float = 0.0) -> int:
    """Start the accesses before ``end``; return how far prefetch was then."""
    marks = Marks(own.begin(0).array)
    with prefetching(marks, 3, 7, 10):
        own.start(0, 0, end, alone)
        return marks.handed_out


def test_a_worker_that_would_have_to_open_the_storage_waits_for_its_samples() -> None:
    assert start(Progress(10, Cold()), 7) == 7


def test_a_worker_that_can_read_at_once_does_not_wait() -> None:
    assert start(Progress(10), 7) == 0


def test_a_worker_waits_for_prefetch_as_long_as_it_would_read_alone() -> None:
    assert start(Progress(10), 7, alone=60.0) == 7
    own = Progress(10)
    marks = Marks(own.begin(0).array)
    marks.attend(60.0)
    begin = time.monotonic()
    own.start(0, 0, 7, alone=0.1)
    assert 0.1 <= time.monotonic() - begin < walk._PATIENCE


def test_a_worker_that_can_read_does_not_wait_for_prefetch_to_start() -> None:
    own = Progress(10)
    marks = Marks(own.begin(0).array)
    assert marks.is_attended, "it is expected to start"
    begin = time.monotonic()
    own.start(0, 0, 7, alone=60.0)
    assert time.monotonic() - begin < walk._PATIENCE
    own.begin(2)
    marks.attend()
    own.begin(4)
    assert not marks.has_come


def test_it_waits_only_while_prefetch_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_PATIENCE", 0.3)
    own = Progress(20, Cold())
    marks = Marks(own.begin(0).array)
    with prefetching(marks, 5):
        own.start(0, 0, 20)
    assert marks.handed_out == 5


def test_it_does_not_wait_for_a_window_that_is_too_small_for_its_batch() -> None:
    own = Progress(20, Cold())
    marks = Marks(own.begin(0).array)
    marks.attend(60.0)
    marks.hand_out(12, is_full=True)
    own.finish(0, 0, 10)
    begin = time.monotonic()
    own.start(0, 10, 10)
    assert time.monotonic() - begin < walk._PATIENCE
    assert marks.served[10:].tolist() == [STARTED] * 10


def test_it_waits_while_prefetch_has_had_no_time_to_see_that_its_window_can_move() -> None:
    own = Progress(20, Cold())
    marks = Marks(own.begin(0).array)
    marks.hand_out(12, is_full=True)
    own.finish(0, 0, 10)
    with prefetching(marks, 12, 20):
        moving = threading.Timer(0.05, own.finish, (0, 10, 2))
        moving.start()
        own.start(0, 12, 8)
        moving.join()
        assert marks.handed_out == 20


def test_it_waits_for_blocks_whatever_it_has_open() -> None:
    assert start(Progress(10, waits=True), 7) == 7


def test_it_does_not_wait_for_a_process_that_is_dead() -> None:
    own = Progress(10, Cold())
    Marks(own.begin(0).array).attend(0.0)
    begin = time.monotonic()
    own.start(0, 0, 10)
    assert time.monotonic() - begin < walk._PATIENCE


def test_it_does_not_wait_while_nothing_is_to_be_read_ahead() -> None:
    own = Progress(10, Cold())
    assert not Marks(own.begin(0, is_held=True).array).is_attended
    begin = time.monotonic()
    own.start(0, 0, 10)
    assert time.monotonic() - begin < walk._PATIENCE
    assert own.memory(0) is own.memory(2)


def test_the_memory_of_an_epoch_serves_the_one_after_the_next() -> None:
    own = Progress(4)
    first = Marks(own.begin(0).array)
    own.start(0, 1, 2)
    own.finish(0, 1, 1)
    assert first.served.tolist() == [0, SERVED, STARTED, 0]
    assert first.generation == 1
    own.begin(1)
    assert (first.generation, first.served.any()) == (1, np.True_)
    own.begin(2)
    assert (first.generation, first.served.any()) == (2, np.False_)
