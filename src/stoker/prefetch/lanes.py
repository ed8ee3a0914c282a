"""Threads that read, as many as make the storage faster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from stoker.source.base import Multiplexer, Room
from stoker.source.packed import Buffer

log = logging.getLogger("stoker.prefetch")
_LONG = 1.0  # seconds between two looks of the multiplexer's thread at least
_GROWTH, _FIRST_GROWTH = 1.5, 2.0
_GAIN = 1.05  # throughput must grow at least so much for a higher limit to be kept
_CALM = 10  # intervals between two attempts to grow
_RECOVERY = 10  # intervals of quiet after the storage asked for less


class ConcurrencyLimit:
    """A limit on concurrency that climbs while throughput climbs, and halves when throttled.

    ``least`` and ``most`` bound it; it starts at ``first``, by default ``least``. From a ``first``
    it doubles as long as that is of use. ``interval`` seconds of reading with the limit reached
    make one measurement. It never looks at a clock itself: the caller says how late it is. Not
    thread-safe.
    """

    def __init__(
        self, least: int = 4, most: int = 64, interval: float = 0.1, first: int = 0
    ) -> None:
        self.limit = min(most, max(least, first))
        """Reads that may be under way now."""
        self._least, self._most, self._interval = least, most, interval
        self._growth = _FIRST_GROWTH if first else _GROWTH
        self._before: tuple[int, float] | None = None  # limit and rate before the attempt under way
        self._quiet = 0  # intervals to wait before the next attempt
        self._bytes = 0
        self._began: float | None = None

    def done(self, num_bytes: int, now: float, saturated: bool) -> None:
        """Note a finished read; ``saturated``: the limit was what held others back."""
        if not saturated:
            self._began = None
            return
        if self._began is None:
            self._began, self._bytes = now, 0
            return
        self._bytes += num_bytes
        if now - self._began >= self._interval:
            self._measured(self._bytes / (now - self._began))
            self._began, self._bytes = now, 0

    def throttled(self) -> None:
        """Note that the storage throttled or failed: back off for a while."""
        self.limit = max(self._least, self.limit // 2)
        self._before, self._quiet, self._began = None, _RECOVERY, None
        self._growth = _GROWTH

    def _measured(self, rate: float) -> None:
        if self._quiet > 0:
            self._quiet -= 1
        elif self._before is None or rate > self._before[1] * _GAIN:
            self._before = self.limit, rate
            self.limit = min(self._most, int(self.limit * self._growth) + 1)
        else:
            self._growth = _GROWTH
            self.limit = self._before[0]
            self._before, self._quiet = None, _CALM


class Work(Protocol):
    """Pieces that may be read at the same time, by several threads."""

    @property
    def num_pieces(self) -> int:
        """How many there are; 1 at least."""
        ...

    def begin(self, piece: int) -> int | None:
        """Note that a piece is begun; return the sample that it is, if it is just that."""
        ...

    def room(self, piece: int) -> Room | None:
        """Return where a piece that is a sample may be written to, if that is known."""
        ...

    def read(self, piece: int) -> int:
        """Read one piece that is begun and return its bytes; raises nothing."""
        ...

    def keep(self, piece: int, buffer: Buffer) -> int:
        """Take the bytes of a piece that is begun and was a sample; return how many they are.

        No bytes: they are in its room.
        """
        ...

    def finish(self) -> bool:
        """Do what is to be done after the last piece; return False if the storage is in trouble.

        Called once, in one of the threads; raises nothing.
        """
        ...


class _Unfinished:
    """Work, and how much of it is begun and left."""

    __slots__ = ("begun", "left", "work")

    def __init__(self, work: Work) -> None:
        self.work, self.begun, self.left = work, 0, work.num_pieces


_Piece = tuple[_Unfinished, int, int | None]  # and the sample that it is


class Lanes:
    """Threads that take the pieces of work in the order in which the work was added.

    A thread goes from one piece to the next without being handed it, which would cost more than
    a small read does. As many read as ``limit`` says, and ``ahead`` times as many pieces should
    lie ready for them. With ``multiplexer`` one thread reads all pieces that are samples, and the
    others only what it does not get. The descriptor :meth:`fileno` becomes readable when less lies
    ready, if :attr:`has_room` was false before. Thread-safe.
    """

    def __init__(
        self, limit: ConcurrencyLimit, ahead: int = 0, multiplexer: Multiplexer | None = None
    ) -> None:
        self._limit, self._ahead, self._multiplexer = limit, ahead, multiplexer
        lock = threading.RLock()
        self._changed, self._more = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[_Unfinished] = deque()
        self._left_over: deque[_Piece] = deque()  # by the multiplexer; they are busy already
        self._waiting = 0  # pieces that no thread has taken
        self._works = 0  # that are not finished
        self.read_bytes = 0
        """Bytes that were read."""
        self._busy = self._idle = self._threads = 0
        self._is_closing = self._has_failed = False
        self._is_held_back = self._is_asked = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._multiplexing: threading.Thread | None = None
        if multiplexer is not None:
            self._multiplexing = threading.Thread(
                target=self._multiplex, args=(multiplexer,), name="stoker-multiplex", daemon=True
            )
            self._multiplexing.start()

    def fileno(self) -> int:
        """Return the descriptor to poll; it is readable until :meth:`hear`."""
        return self._wake

    def hear(self) -> None:
        """Make the descriptor unreadable until something happens again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    @property
    def has_room(self) -> bool:
        """Whether work should be added, so that all threads have something to do."""
        with self._changed:
            self._is_held_back = self._is_asked = not self._lack
            return not self._is_asked

    @property
    def has_failed(self) -> bool:
        """Whether the storage gave up since this was last looked at."""
        failed, self._has_failed = self._has_failed, False
        return failed

    @property
    def is_idle(self) -> bool:
        """Whether all work is finished."""
        return self._works == 0

    def add(self, work: Work) -> None:
        """Have all pieces of ``work`` read."""
        with self._changed:
            self._queue.append(_Unfinished(work))
            self._waiting += work.num_pieces
            self._works += 1
            self._call()

    def close(self) -> None:
        """Start no more pieces. Those under way are not waited for: a storage may hang."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._more.notify()
            if self._multiplexer is not None:
                self._multiplexer.wake()

    @property
    def _lack(self) -> bool:
        return self._waiting + self._busy < self._limit.limit * (1 + self._ahead)

    def _call(self) -> None:
        """Have as many threads at work as there are pieces for, within the limit."""
        if self._multiplexer is not None and self._may_begin:
            self._more.notify()
            self._multiplexer.wake()
        wanted = len(self._left_over)
        if self._multiplexer is None:
            wanted += max(0, min(self._waiting, self._limit.limit - self._busy))
        self._changed.notify(min(wanted, self._idle))
        for _ in range(min(wanted - self._idle, self._limit.limit - self._threads)):
            self._threads += 1
            threading.Thread(target=self._run, name="stoker-fetch", daemon=True).start()

    def _run(self) -> None:
        """Be one thread."""
        while (taken := self._wait()) is not None:
            while taken is not None:
                unfinished, piece, _ = taken
                taken = self._done([unfinished], unfinished.work.read(piece))

    def _wait(self) -> _Piece | None:
        """Wait for a piece, and return it; None when there will be none."""
        with self._changed:
            self._idle += 1
            while not self._is_closing and (taken := self._next()) is None:
                self._changed.wait()
            self._idle -= 1
            return None if self._is_closing else taken

    def _next(self) -> _Piece | None:
        """Return what a thread should read now, if there is anything."""
        if self._is_closing:
            return None
        if self._left_over:
            return self._left_over.popleft()
        return self._take() if self._multiplexer is None and self._may_begin else None

    @property
    def _may_begin(self) -> bool:
        return self._waiting > 0 and self._busy < self._limit.limit

    def _take(self) -> _Piece:
        first = self._queue[0]
        piece = first.begun
        first.begun += 1
        if first.begun == first.work.num_pieces:
            self._queue.popleft()
        self._waiting -= 1
        self._busy += 1
        return first, piece, first.work.begin(piece)

    def _done(self, pieces_of: Sequence[_Unfinished], num_bytes: int) -> _Piece | None:
        """Note that a piece of each is read; return the next one for a thread, if there is one."""
        finished = []
        with self._changed:
            for unfinished in pieces_of:
                unfinished.left -= 1
                if unfinished.left == 0:
                    finished.append(unfinished)
            if not finished:
                taken = self._turn(len(pieces_of), num_bytes)
        if finished:
            are_fine = [unfinished.work.finish() for unfinished in finished]
            with self._changed:
                self._works -= len(finished)
                if not all(are_fine):
                    self._has_failed = True
                    self._limit.throttled()
                taken = self._turn(len(pieces_of), num_bytes)
        if self._is_asked and self._lack:
            self._is_asked = False
            # Not with the lock held: the interpreter may go to another thread in here.
            os.eventfd_write(self._wake, 1)
        return taken

    def _turn(self, pieces: int, num_bytes: int) -> _Piece | None:
        before = self._limit.limit
        self._busy -= pieces
        self.read_bytes += num_bytes
        is_saturated = self._is_held_back or self._waiting > 0
        self._limit.done(num_bytes, time.monotonic(), is_saturated)
        is_multiplexed = threading.current_thread() is self._multiplexing
        taken = None if is_multiplexed else self._next()
        if not is_multiplexed and (self._limit.limit > before or self._multiplexer is not None):
            self._call()
        return taken

    def _multiplex(self, multiplexer: Multiplexer) -> None:
        """Be the thread that reads many at once; should it fail, the others read all."""
        under_way: set[_Piece] = set()
        try:
            while (taken := self._await_pieces(not under_way)) is not None:
                alone = [piece for piece in taken if piece[2] is None]
                together = [(piece[2], piece) for piece in taken if piece[2] is not None]
                self._leave(alone)
                under_way.update(piece for _, piece in together)
                rooms = [unfinished.work.room(index) for _, (unfinished, index, _) in together]
                multiplexer.start(together, rooms)
                if under_way:
                    answers = multiplexer.wait(_LONG)
                    under_way.difference_update(piece for piece, _ in answers)
                    self._came(answers)
            multiplexer.close()
        except Exception:
            log.warning("reading in single threads from now on", exc_info=True)
            self._multiplexer = None
            self._leave(list(under_way))
            with self._changed:
                self._call()

    def _await_pieces(self, is_idle: bool) -> list[_Piece] | None:
        """Return what may begin now; wait for something if ``is_idle``. None when closing."""
        with self._changed:
            while is_idle and not self._is_closing and not self._may_begin:
                self._more.wait()
            if self._is_closing:
                return None
            taken = []
            while self._may_begin:
                taken.append(self._take())
            return taken

    def _came(self, answers: Sequence[tuple[_Piece, Buffer | None]]) -> None:
        self._leave([piece for piece, buffer in answers if buffer is None])
        whole = [(*piece, buffer) for piece, buffer in answers if buffer is not None]
        if whole:
            num_bytes = sum(each.work.keep(index, buffer) for each, index, _, buffer in whole)
            self._done([each for each, _, _, _ in whole], num_bytes)

    def _leave(self, pieces: list[_Piece]) -> None:
        """Have the threads read them."""
        if pieces:
            with self._changed:
                self._left_over += pieces
                self._call()
