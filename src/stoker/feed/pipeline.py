"""Batches made by threads, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Request = TypeVar("_Request")
_Served = TypeVar("_Served")


def in_order(
    serve: Callable[[_Request], _Served], requests: Iterable[_Request], threads: int, ready: int
) -> Iterator[_Served]:
    """Yield what ``serve`` makes of each request, in order, at most ``ready`` ahead of the caller.

    Raises what ``serve`` does, in its place. Without threads, and with ``ready`` 0, the caller
    serves. Closing the iterator waits for those that are being served; the rest is dropped.
    """
    if not threads or not ready:
        yield from map(serve, requests)
        return
    left = iter(requests)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="stoker-feed")
    try:
        running: deque[Future[_Served]] = deque()
        running.extend(pool.submit(serve, request) for request in islice(left, ready))
        while running:
            served = running.popleft().result()
            running.extend(pool.submit(serve, request) for request in islice(left, 1))
            yield served
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
