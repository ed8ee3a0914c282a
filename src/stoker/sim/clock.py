"""Virtual time: how long the epochs of a replay would take on given storage and processors.

The pipeline is that of the Loader, access by access:

- **Prefetch** asks for the samples that have to be fetched in the order of the plan, as soon as
  they lie within ``window_bytes``, cached samples not counted, of the first batch that no worker
  has finished (but always those of the batch that is due), with ``concurrency`` requests under way
  at most. A request takes its latency, and no less than the rates of the storage allow when all
  are served in order. What is not read ahead, a worker asks for when it begins the batch.
- **Workers** take the batches in turn. One begins its next batch when it has finished the last one
  and training has taken the one ``workers x ahead`` batches before; waits for its fetched samples;
  and decodes.
- **Training** takes batches in order, and computes.

What the cache serves takes no time but that of decoding. Packages are requests that
no batch waits for; samples rescored between epochs take no time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.types import Outcome

_INF = math.inf


@dataclass(frozen=True)
class Conditions:
    """The storage, the processors and the settings of a training, to compute its time by.

    Raises :class:`~stoker.errors.ConfigError` for what is negative, not a number, or 0 where that
    means nothing.
    """

    compute_rate: float
    """Samples a second that training takes when it never waits."""
    latency: float = 0.005
    """Median seconds of a request."""
    tail: float = 0.0
    """Standard deviation of the logarithm of the latency, which is log-normal; 0: all the same."""
    bandwidth: float = _INF
    """Bytes a second of the storage."""
    iops: float = _INF
    """Requests a second of the storage."""
    concurrency: int = 64
    """Requests under way at once."""
    window_bytes: float = 256 << 20
    """Bytes not cached that prefetch may be ahead of the workers."""
    decode_seconds: float = 0.0
    """Of one sample, on one worker; for all that comes between its bytes and its batch."""
    workers: int = 4
    """Processes that decode; 0: training does it itself, before each batch."""
    ahead: int = 2
    """Batches that each of them may have ready (torch's ``prefetch_factor``)."""
    batch_seconds: float = 0.0
    """That the training loop spends on taking a batch which is ready; counted as stall."""
    start_seconds: float = 0.0
    """Between the end of an epoch and the first batch that workers can begin in the next one."""

    def __post_init__(self) -> None:
        for name in ("compute_rate", "bandwidth", "iops", "concurrency", "ahead"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give more than 0")
        for name in (
            "latency",
            "tail",
            "window_bytes",
            "decode_seconds",
            "batch_seconds",
            "workers",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give 0 or more")
        if not (math.isfinite(self.latency + self.tail) and self.start_seconds >= 0):
            raise ConfigError(
                f"latency={self.latency}, tail={self.tail}, start_seconds={self.start_seconds} are "
                "refused: give seconds"
            )

    def reads_a_second(self, mean_size: float) -> float:
        """Samples of so many bytes that the storage gives in a second."""
        by_latency = self.concurrency / self.latency if self.latency else _INF
        return min(self.iops, self.bandwidth / mean_size, by_latency)


@dataclass(frozen=True)
class EpochTime:
    """The time of one epoch, in seconds."""

    seconds: float
    """From the end of the epoch before to the end of this one."""
    stall_seconds: float
    """Of these, how long training waited for batches."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which training computed, 0 to 1."""
        return 1 - self.stall_seconds / self.seconds if self.seconds else 1.0


class Clock:
    """Computes the time of epochs from how their samples were served; one thread.

    ``sizes``: ``i64[N]``, bytes. ``knows_next``: whether the plan of the next epoch is known
    before this one ends, so that prefetch continues across the boundary. :meth:`add` batches, then
    :meth:`end_epoch`. Latencies depend on ``seed`` and the number of requests before. Takes some
    .4 us for an access that is fetched, and 20 us for a batch.
    """

    def __init__(
        self,
        conditions: Conditions,
        sizes: NDArray[np.int64],
        *,
        knows_next: bool = True,
        seed: int = 0,
    ) -> None:
        self._given, self._knows_next = conditions, knows_next
        self._sizes = sizes.astype(np.float64)
        self._rng = np.random.default_rng([seed, 0xC10C])
        self._storage = _Storage(conditions)
        self._window = _Window(conditions.window_bytes)
        self._workers = _Workers(conditions)
        self._now = self._stall = self._began = 0.0
        self._known = 0.0 if knows_next else conditions.start_seconds  # from when on, its plan
        self._workers.begin_epoch(conditions.start_seconds)

    @property
    def now(self) -> float:
        """Seconds from the start to the end of the latest step."""
        return self._now

    def add(
        self,
        ids: NDArray[np.uint32],
        outcomes: NDArray[np.int8],
        package_reads: int = 0,
        package_bytes: float = 0.0,
        alone: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take a batch of samples ``u32[n]`` served so, and the packages read meanwhile.

        ``alone``: ``bool[n]``, which of those fetched are not read ahead; None: none of them.
        """
        is_read = outcomes == Outcome.FETCHED
        by_worker = self._sizes[ids[is_read & alone]] if alone is not None else self._sizes[:0]
        read = self._sizes[ids[is_read if alone is None else is_read & ~alone]]
        if package_reads:
            brought = np.full(package_reads, package_bytes)
            self._storage.read(
                np.full(package_reads, self._known), self._latencies(brought), brought
            )
        begins = self._workers.next_begin(self._now)
        ready = -math.inf
        if len(read):
            gates = self._window.opens(np.cumsum(read))
            gates = np.minimum(np.maximum(gates, self._known), begins)
            ready = self._storage.read(gates, self._latencies(read), read)
        if len(by_worker):
            own = self._storage.read_late(begins, self._latencies(by_worker), by_worker)
            ready = max(ready, own)
        finished = max(begins, ready) + len(ids) * self._given.decode_seconds
        self._window.finish(float(read.sum()), finished)
        taken = max(finished, self._now)
        self._workers.note(finished, taken)
        began = taken + self._given.batch_seconds
        self._stall += began - self._now
        self._now = began + len(ids) / self._given.compute_rate

    def add_run(self, ids: NDArray[np.uint32], outcomes: NDArray[np.int8], batch_size: int) -> None:
        """Take several batches of samples ``u32[n]`` served so, without packages."""
        for start in range(0, len(ids), batch_size):
            self.add(ids[start : start + batch_size], outcomes[start : start + batch_size])

    def end_epoch(self) -> EpochTime:
        """Return the time of the epoch that is over, and begin the next one."""
        found = EpochTime(self._now - self._began, self._stall)
        self._began, self._stall = self._now, 0.0
        begins = self._now + self._given.start_seconds
        self._workers.begin_epoch(begins)
        if not self._knows_next:
            self._known = begins
        return found

    def _latencies(self, reads: NDArray[np.float64]) -> NDArray[np.float64]:
        given = self._given
        if not given.tail:
            return np.full(len(reads), given.latency)
        return given.latency * np.exp(given.tail * self._rng.standard_normal(len(reads)))


class _Storage:
    """Requests in the order of the plan: as many at once as there are lanes, at two rates."""

    def __init__(self, given: Conditions) -> None:
        self._lanes = [0.0] * given.concurrency  # a heap: when each is free
        self._rates = _Rates(1 / given.iops, 1 / given.bandwidth)
        self._late_rates = _Rates(1 / given.iops, 1 / given.bandwidth)
        self._latest = 0.0

    def read(
        self,
        gates: NDArray[np.float64],
        latencies: NDArray[np.float64],
        sizes: NDArray[np.float64],
    ) -> float:
        """Return when the last of these is there; each goes out at its gate, and in order."""
        gates = np.maximum.accumulate(np.maximum(gates, self._latest))
        self._latest = float(gates[-1])
        return self._rates.pass_through(self._lanes, gates, latencies, sizes)

    def read_late(
        self, gate: float, latencies: NDArray[np.float64], sizes: NDArray[np.float64]
    ) -> float:
        """Return when the last of these is there, which go out at ``gate``, out of order.

        Others that went out before may come in later calls: these take none of the time before.
        """
        self._late_rates.wait_for(self._rates)
        gates = np.full(len(sizes), gate)
        last = self._late_rates.pass_through(self._lanes, gates, latencies, sizes)
        self._rates.take(sizes)
        return last


class _Rates:
    """Until when the requests and the bytes of a second are used up."""

    def __init__(self, request_seconds: float, byte_seconds: float) -> None:
        self._request_seconds, self._byte_seconds = request_seconds, byte_seconds
        self._requests_free = self._bytes_free = 0.0

    def wait_for(self, other: _Rates) -> None:
        """Begin when what ``other`` was asked for is over."""
        self._requests_free = max(self._requests_free, other._requests_free)
        self._bytes_free = max(self._bytes_free, other._bytes_free)

    def take(self, sizes: NDArray[np.float64]) -> None:
        """Use up what requests of these sizes take."""
        self._requests_free += len(sizes) * self._request_seconds
        self._bytes_free += float(sizes.sum()) * self._byte_seconds

    def pass_through(
        self,
        lanes: list[float],
        gates: NDArray[np.float64],
        latencies: NDArray[np.float64],
        sizes: NDArray[np.float64],
    ) -> float:
        """Return when the last request is over, each in the first lane that is free."""
        requests, transfers = self._requests_free, self._bytes_free
        a_request, last = self._request_seconds, -math.inf
        rows = zip(
            gates.tolist(), latencies.tolist(), (sizes * self._byte_seconds).tolist(), strict=True
        )
        for gate, latency, transfer in rows:  # plain numbers: arrays cannot do what heaps do
            start = lanes[0]
            if gate > start:
                start = gate
            requests = (requests if requests > start else start) + a_request
            transfers = (transfers if transfers > start else start) + transfer
            done = start + latency
            if requests > done:
                done = requests
            if transfers > done:
                done = transfers
            heapreplace(lanes, done)
            if done > last:
                last = done
        self._requests_free, self._bytes_free = requests, transfers
        return last


class _Window:
    """How far ahead of the workers samples may be asked for."""

    def __init__(self, num_bytes: float) -> None:
        self._num_bytes = num_bytes
        self._total = self._latest = 0.0
        # Batches that may still be in the way: where each ends, and when all up to it were over.
        self._ends: list[float] = []
        self._over: list[float] = []

    def opens(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``f64[n]``, when there is room for samples that end so far into the next batch.

        Infinite for those that only fit once that batch has begun.
        """
        behind = self._total - self._num_bytes  # the first of ``ends`` lies beyond
        drop = bisect_left(self._ends, behind)
        del self._ends[:drop], self._over[:drop]
        over = np.array([-math.inf, *self._over, math.inf])
        needed = behind + ends
        first = 1 + np.searchsorted(self._ends, needed, "left")
        found: NDArray[np.float64] = np.where(needed > 0, over[first], -math.inf)
        return found

    def finish(self, num_bytes: float, time: float) -> None:
        """Note that workers are over with the next batch at ``time``."""
        self._total += num_bytes
        self._ends.append(self._total)
        self._latest = max(self._latest, time)
        self._over.append(self._latest)


class _Workers:
    """When the worker whose turn it is can begin its batch."""

    def __init__(self, given: Conditions) -> None:
        self._is_apart = given.workers > 0
        self._finished: deque[float] = deque(maxlen=max(1, given.workers))
        self._taken: deque[float] = deque(maxlen=max(1, given.workers * given.ahead))
        self._begin = 0.0

    def begin_epoch(self, time: float) -> None:
        """Note that an epoch's first batches are handed out at ``time``."""
        self._begin = time
        self._finished.clear()
        self._taken.clear()

    def next_begin(self, now: float) -> float:
        """Return when the next batch is begun, if training is over with the one before ``now``."""
        if not self._is_apart:
            return max(self._begin, now)
        begin = self._begin
        for times in (self._finished, self._taken):
            if len(times) == times.maxlen:
                begin = max(begin, times[0])
        return begin

    def note(self, finished: float, taken: float) -> None:
        """Note when that batch was ready, and when training took it."""
        self._finished.append(finished)
        self._taken.append(taken)
