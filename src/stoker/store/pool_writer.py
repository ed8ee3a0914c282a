"""What is sent to a pool without anybody waiting for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("stoker.pool")

_MOST_BYTES = 64 << 20
_MOST_JOBS = 4096
_PAUSE = 0.005  # seconds between two jobs that are not urgent


class PoolWriter:
    """A thread that does jobs one after the other, and a bounded queue in front of it.

    A job is refused when the queue is full, rather than waited for. Those of :meth:`later` come
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
        """Let the queue run empty, ``timeout`` seconds at most, and end. May be called again."""
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
            self._is_busy = False  # nobody waits for those
        time.sleep(_PAUSE)
        return job
