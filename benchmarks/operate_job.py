"""Jobs to be looked at: ``operate_job.py HOW_MANY SECONDS STEP FIRST`` for ``operate.py``.

Each job has a cache of its own, those from number FIRST on. They train for so many seconds, with
steps of so many, print what metrics cost their training threads as JSON, and stay without doing
anything until their standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import stoker
from stoker.epoch.controller import Controller
from stoker.jobs.metrics import Waits
from stoker.source import MemorySource


class Spent:
    """Processor seconds of a method, in the threads that call it."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        method: Callable[..., Any] = getattr(owner, name)

        def measured(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = method(*arguments)
            self.seconds += time.thread_time() - begin
            self.calls += 1
            return result

        setattr(owner, name, measured)


def train(number: int, seconds: float, step: float) -> None:
    """Train one job, and leave its cache open."""
    source = MemorySource([bytes(1000 + number)] * 1000)
    feed = stoker.Feed(source, 32, cache=stoker.Cache("50%", prefetch=0), recipe="lru")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in feed:
            time.sleep(step)
            if time.monotonic() >= end:
                break
    _open.append(feed)


_open: list[stoker.Feed] = []


def main() -> None:
    """Train the jobs beside each other, and wait."""
    how_many, seconds, step = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    waits, publishing = Spent(Waits, "add"), Spent(Controller, "_publish")
    first = int(sys.argv[4])
    threads = [
        threading.Thread(target=train, args=(first + number, seconds, step))
        for number in range(how_many)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = {"batches": waits.calls, "waits": waits.seconds}
    told |= {"publications": publishing.calls, "publishing": publishing.seconds}
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    for feed in _open:
        feed.close()


if __name__ == "__main__":
    main()
