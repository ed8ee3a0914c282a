"""Work that is waited for with a timeout, or not at all."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Call:
    """One piece of work that was handed over."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work."""
        try:
            self.result = self._work()
        except BaseException as error:  # examined by the waiting thread
            self.error = error
        finally:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        """Wait until it is done, ``timeout`` seconds at most; return whether it is."""
        return self._done.wait(max(0.0, timeout))


class Threads:
    """Threads, ``most`` at most, each kept for the next work.

    For calls without a timeout of their own, like name resolution: what waits here is a thread that
    no batch needs, and never the batch. The interpreter does
    not wait for them when it ends. Safe in any thread; of one process.
    """

    def __init__(self, most: int = 64) -> None:
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._idle = self._count = 0
        self._most = most

    def start(self, work: Callable[[], Any]) -> Call | None:
        """Run ``work``; None if every thread is stuck."""
        with self._mutex:
            if self._idle:
                self._idle -= 1
            elif self._count < self._most:
                self._count += 1
                threading.Thread(target=self._run, name="stoker-pool", daemon=True).start()
            else:
                return None
        call = Call(work)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Let threads end once they are free."""
        with self._mutex:
            for _ in range(self._count):
                self._calls.put(None)
            self._most = 0

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            with self._mutex:
                self._idle += 1
            del call  # the bytes that it brought


class Watch:
    """Ends what takes too long: calls ``cut`` for each thing that is watched past its deadline.

    To watch something costs no switch of threads as a rule: the thread that sees to it sleeps until
    the first deadline it knows of. It starts with the first use, and the interpreter does not wait
    for it. Safe in any thread; of one process.
    """

    def __init__(self, cut: Callable[[Any], None]) -> None:
        self._cut = cut
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, Any]] = {}
        self._count = 0
        self._wakes = 0.0  # when the thread looks next; 0: when it is told
        self._is_started = self._is_closed = False

    def begin(self, thing: Any, deadline: float) -> int:
        """Watch ``thing`` until ``deadline``, of time.monotonic(); return a number for it."""
        with self._changed:
            self._count += 1
            self._watched[self._count] = deadline, thing
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="stoker-pool-watch", daemon=True).start()
            elif not 0 < self._wakes <= deadline:
                self._changed.notify()
            return self._count

    def end(self, number: int) -> bool:
        """Stop watching it; return whether it was in time."""
        with self._changed:
            return self._watched.pop(number, None) is not None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                for number, (deadline, thing) in list(self._watched.items()):
                    if deadline <= now:
                        # With the lock held: it is not given to anybody else meanwhile.
                        del self._watched[number]
                        self._cut(thing)
                first = min((deadline for deadline, _ in self._watched.values()), default=0.0)
                self._wakes = first
                self._changed.wait(first - now if first else None)


log = logging.getLogger("stoker.pool")

_MOST_BYTES = 64 << 20
_MOST_JOBS = 4096
_PAUSE = 0.005  # seconds between two jobs that are not urgent


class PoolWriter:
    """A thread that does jobs one after the other, and a bounded queue in front of it.

    When the queue is full a job is rejected rather than waited for. Those of :meth:`later` come
    after all others, with pauses. The thread starts with the first job; the interpreter does not
    wait for it. Safe in any thread; of one process.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._soon: deque[tuple[int, Callable[[], object]]] = deque()
        self._later: deque[Callable[[], object]] = deque()
        self._bytes = 0
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], object], num_bytes: int = 0) -> bool:
        """Queue a job that holds ``num_bytes``; return whether there was room."""
        with self._changed:
            is_full = self._bytes + num_bytes > _MOST_BYTES and bool(self._soon)
            if self._is_closed or is_full or len(self._soon) >= _MOST_JOBS:
                return False
            self._soon.append((num_bytes, job))
            self._bytes += num_bytes
            self._wake()
            return True

    def later(self, jobs: list[Callable[[], object]]) -> None:
        """Queue jobs for when there are no others, in place of those that still wait there."""
        with self._changed:
            if not self._is_closed:
                self._later = deque(jobs)
                self._wake()

    def flush(self, timeout: float) -> bool:
        """Wait until everything but the jobs for later is done; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._soon and not self._is_busy, timeout)

    def close(self, timeout: float) -> None:
        """Finish the queue, ``timeout`` seconds at most, and end. May be called again."""
        self.flush(timeout)
        with self._changed:
            self._is_closed = True
            self._soon.clear()
            self._later.clear()
            self._changed.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stoker-pool-out", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:
                log.info("not written: %s", error)
            del job

    def _next(self) -> Callable[[], object] | None:
        """Wait for a job and return it; None at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._soon or self._later or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            if self._soon:
                num_bytes, job = self._soon.popleft()
                self._bytes -= num_bytes
                return job
            job = self._later.popleft()
            self._is_busy = False  # nothing waits for those
        time.sleep(_PAUSE)
        return job
