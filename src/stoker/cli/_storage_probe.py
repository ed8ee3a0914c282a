"""Measures a storage through a Source: latency of single reads, throughput against concurrency.

No sample is read twice (unless there is only one), so that what an earlier read left in a cache on
the way does not count.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.source.base import Source

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PERCENTILES = (50, 90, 99)
_KEPT = 64
"""Samples kept for measuring what decoding costs."""
_FIRST = 2.0
"""How much more time the reads one by one get, whose tail is of interest, than other steps."""


@dataclass(frozen=True)
class Step:
    """What was reached at one concurrency."""

    concurrency: int
    reads: int
    num_bytes: int
    seconds: float

    @property
    def reads_per_second(self) -> float:
        """Samples a second."""
        return self.reads / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second."""
        return self.num_bytes / self.seconds


@dataclass
class Probe:
    """What was measured."""

    latency: dict[str, float] = field(default_factory=dict)
    """Seconds of a single read: ``p50``, ``p90``, ``p99``, ``max``."""
    steps: list[Step] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    """Some of the samples."""

    @property
    def best(self) -> Step:
        """The step that delivered the most samples a second."""
        return max(self.steps, key=lambda step: step.reads_per_second)


def probe(source: Source, *, seconds: float, most_bytes: int, seed: int = 0) -> Probe:
    """Measure for about ``seconds``, reading ``most_bytes`` or a little more, in random order.

    A step that was begun is finished, which on storage that stalls takes longer. ``source`` has at
    least one sample. Raises the StokerError of a read that fails.
    """
    order = np.random.default_rng(seed).permutation(len(source)).astype(np.uint32)
    order = order[np.cumsum(source.sizes[order]) <= max(most_bytes, source.sizes[order[0]])]
    found = Probe()
    source.read(order[:1])  # starts what reading needs: connections, a helper process
    order = order[1:] if len(order) > 1 else order
    slot = seconds / (len(CONCURRENCIES) - 1 + _FIRST)
    for place, concurrency in enumerate(CONCURRENCIES):
        share = _share(CONCURRENCIES[place:])
        ids = order[: max(1, int(len(order) * share))]
        if place and len(ids) < 2 * concurrency:
            break  # too few left to fill so many lanes
        limit = slot * _FIRST if not place else slot
        readers = _Readers(source, ids, concurrency, limit)
        found.steps.append(readers.run())
        order = order[readers.taken :]
        if not place:
            found.kept = readers.kept
            found.latency = _percentiles(np.array(readers.latencies))
    return found


def _share(left: tuple[int, ...]) -> float:
    """Return the share of the remaining samples for the first of the remaining steps."""
    weights = np.sqrt(left)
    return float(weights[0] / weights.sum())


def _percentiles(latencies: NDArray[np.float64]) -> dict[str, float]:
    found = {f"p{p}": float(np.percentile(latencies, p)) for p in PERCENTILES}
    return found | {"max": float(latencies.max())}


class _Readers:
    """Threads that read one sample after the other, each sample by one of them."""

    def __init__(
        self, source: Source, ids: NDArray[np.uint32], concurrency: int, seconds: float
    ) -> None:
        self.taken = 0
        self.kept: list[bytes] = []
        self.latencies: list[float] = []
        self._source, self._ids, self._seconds = source, ids, seconds
        self._concurrency = concurrency
        self._bytes, self._deadline = 0, 0.0
        self._mutex = threading.Lock()
        self._error: StokerError | None = None

    def run(self) -> Step:
        """Read until the time is over or all are read."""
        lanes = range(self._concurrency)
        threads = [threading.Thread(target=self._read, daemon=True) for _ in lanes]
        begin = time.perf_counter()
        self._deadline = begin + self._seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if self._error is not None:
            raise self._error
        return Step(self._concurrency, len(self.latencies), self._bytes, seconds)

    def _read(self) -> None:
        while (ids := self._next()) is not None:
            begin = time.perf_counter()
            try:
                (sample,) = self._source.read(ids)
            except StokerError as error:
                self._error = error
                return
            took = time.perf_counter() - begin
            with self._mutex:
                self.latencies.append(took)
                self._bytes += len(sample)
                if len(self.kept) < _KEPT:
                    self.kept.append(sample)

    def _next(self) -> NDArray[np.uint32] | None:
        with self._mutex:
            over = time.perf_counter() >= self._deadline and self.taken
            if over or self.taken >= len(self._ids) or self._error is not None:
                return None
            self.taken += 1
            return self._ids[self.taken - 1 : self.taken]
