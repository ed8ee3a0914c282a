"""Threads that work off a queue: each thing once at a time, the urgent first."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger("stoker.tiering")

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Calls ``work(item)`` in ``threads`` threads.

    Items with the same ``key`` are not worked on at the same time: one that is waiting stands for
    those put later, one that comes while another is at work follows it. Smaller ``urgency`` goes
    first, then order of arrival decides. An exception from ``work`` is logged. The threads have the
    niceness ``nice``, as far as the system lets them.
    """

    def __init__(
        self,
        threads: int,
        work: Callable[[T], object],
        *,
        key: Callable[[T], Hashable],
        nice: int = 0,
    ) -> None:
        self._work, self._key, self._nice = work, key, nice
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = itertools.count()
        self._waiting: set[Hashable] = set()
        self._running: set[Hashable] = set()
        self._again: dict[Hashable, tuple[int, T]] = {}
        self._closed = False
        self._condition = threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, item: T, urgency: int = 0) -> None:
        """Have an item worked on."""
        with self._condition:
            key = self._key(item)
            if key in self._running:
                self._again[key] = urgency, item
            elif key not in self._waiting:
                self._push(key, item, urgency)

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._waiting)

    def is_idle(self) -> bool:
        """Whether nothing waits or is worked on."""
        with self._condition:
            return not (self._waiting or self._running)

    def close(self) -> None:
        """Forget what waits, and return when the threads have ended."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _push(self, key: Hashable, item: T, urgency: int) -> None:
        self._waiting.add(key)
        heapq.heappush(self._heap, (urgency, next(self._arrivals), item))
        self._condition.notify()

    def _run(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):  # each thread has its own on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._heap or self._closed)
                if self._closed:
                    return
                item = heapq.heappop(self._heap)[2]
                key = self._key(item)
                self._waiting.discard(key)
                self._running.add(key)
            try:
                self._work(item)
            except Exception:  # of this item: the others still need the thread
                log.exception("an item of work failed: %r", item)
            with self._condition:
                self._running.discard(key)
                if key in self._again:
                    urgency, item = self._again.pop(key)
                    self._push(key, item, urgency)
