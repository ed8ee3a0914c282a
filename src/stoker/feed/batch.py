"""A batch as the training loop gets it, and threads that make batches in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import ServedBatch

_OF_NUMBERS = (np.ndarray, np.generic, bool, int, float)
_Request = TypeVar("_Request")
_Served = TypeVar("_Served")


@dataclass(frozen=True, eq=False, slots=True)
class Batch(ServedBatch):
    """``n`` samples, and what they are; give it to ``Feed.observe``."""

    data: Any = None
    """An array ``[n, ...]`` where the samples are arrays or numbers of one shape and dtype, else a
    list of ``n`` samples: bytes without a decoder. One :class:`stoker.source.Packed` with
    ``decode="packed"``, a dictionary of arrays with ``batching=``. With ``to_device``, what that
    made of it."""
    targets: Any = None
    """``[n, ...]``, the targets of the samples really served; None where there are none."""

    @property
    def weights(self) -> NDArray[np.float32]:
        """The weight of each sample in the loss, ``f32[n]``.

        A recipe that learns from a part of each batch only sets them in ``Feed.observe``.
        """
        self.note_weights_used()
        if self.plan_weights is None:
            return np.ones(len(self.ids), np.float32)
        return self.plan_weights.copy()


def stacked(samples: list[Any]) -> Any:
    """Return arrays or numbers of one shape and dtype as one array ``[n, ...]``, else a list."""
    if not all(isinstance(sample, _OF_NUMBERS) for sample in samples):
        return samples
    arrays = [np.asarray(sample) for sample in samples]
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        return samples
    return np.stack(arrays)


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
