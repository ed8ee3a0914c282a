"""Work that is waited for only so long."""

from __future__ import annotations

import queue
import threading
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

    Sockets, TLS and name services each wait in their own way, and some cannot be told for how
    long: what waits here is a thread that nobody needs, and never the batch. The interpreter does
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
