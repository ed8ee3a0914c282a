"""Work that is waited for only so long."""

from __future__ import annotations

import queue
import threading
import time
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
        except BaseException as error:  # to be looked at by whoever waits
            self.error = error
        finally:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        """Wait until it is done, ``timeout`` seconds at most; return whether it is."""
        return self._done.wait(max(0.0, timeout))


class Threads:
    """Threads, ``most`` at most, each kept for the next work.

    For what cannot be told how long to wait, like a name service: what waits here is a thread that
    nobody needs, and never the batch. The interpreter does
    not wait for them when it ends. Safe in any thread; of one process.
    """

    def __init__(self, most: int = 64) -> None:
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._idle = self._count = 0
        self._most = most

    def start(self, work: Callable[[], Any]) -> Call | None:
        """Have ``work`` done; None if every thread is stuck."""
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
        """Watch it no more; return whether it was in time."""
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
