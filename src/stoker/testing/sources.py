"""Sources that behave like storage that is slow, with limits that processes share, or faulty."""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.base import BaseSource, Errors, PackedRead, Source, check_ids, without
from stoker.source.packed import Bytes, Offsets, offsets_of, unpack

FAULTS = ("unavailable", "not_found", "corrupt", "short", "flip", "stall")
"""What can happen to a read: three errors by name, a sample that lacks its end, a flipped bit
(neither is reported), and a long wait."""

_ERRORS: dict[str, tuple[type[SourceError], str]] = {
    "unavailable": (SourceUnavailable, "the storage did not answer"),
    "not_found": (SampleNotFound, "it is not there"),
    "corrupt": (SampleCorrupt, "its bytes cannot be used"),
}


class SlowSource(BaseSource):
    """Another source behind simulated storage; every sample is one request.

    A batch's requests go out ``concurrency`` at a time, and each takes its latency: lognormal
    with the median ``latency`` and the shape ``tail``. Which one a request takes depends only on
    ``seed``, the sample and how often it was read before, so a run can be repeated however
    the reads are spread over processes. ``bandwidth`` and ``iops`` are limits of the storage:
    all threads and processes that share this object share them.

    ``reads`` counts how often each sample was read, also over all processes, so that a test can
    assert that a sample was fetched exactly once. Thread-safe; works in children of every start
    method; a process killed in a read leaves nothing locked.
    """

    def __init__(
        self,
        source: Source,
        *,
        latency: float = 0.005,
        tail: float = 0.5,
        bandwidth: float | None = None,
        iops: float | None = None,
        concurrency: int = 16,
        seed: int = 0,
    ) -> None:
        """Put slow storage before ``source``.

        ``latency`` is in seconds, ``tail`` is the standard deviation of its logarithm (0 makes it
        constant; at 0.5 one request in a hundred takes over three times the median),
        ``bandwidth`` in bytes per second, ``iops`` in requests per second; None is unlimited.
        Raises :class:`ConfigError` for anything negative, not finite, or a limit of zero.
        """
        for name, value in (("latency", latency), ("tail", tail)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} is not possible: give 0 or more")
        for name, limit in (("bandwidth", bandwidth), ("iops", iops)):
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name}={limit} is not possible: give more than 0, or None")
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency} is not possible: give 1 or more")
        self._source = source
        self._latency, self._tail = latency, tail
        self._seconds_per_byte = 1 / bandwidth if bandwidth else 0.0
        self._seconds_per_request = 1 / iops if iops else 0.0
        self._concurrency, self._seed = concurrency, seed
        self._reads = SharedArray.create(len(source), np.int64, "reads")
        self._meter = _Meter()

    def __len__(self) -> int:
        return len(self._source)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._source.sizes

    @property
    def sizes_are_exact(self) -> bool:
        """Whether those of the source behind are."""
        return self._source.sizes_are_exact

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the source behind."""
        return self._source.fingerprint

    @property
    def reads(self) -> npt.NDArray[np.int64]:
        """How often each sample was read so far by all processes, i64[N], read-only and live."""
        return self._reads.read_only

    def reset_reads(self) -> None:
        """Reset the counts, which also repeats the latencies from the first."""
        self._reads.array[:] = 0

    def name(self, sample_id: int) -> str:
        """Return the name that the source behind gives the sample."""
        return self._source.name(sample_id)

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Read from the source behind, no faster than the storage allows."""
        with self._as_slow_as(ids):
            return self._source.read(ids)

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Read from the source behind, no faster than the storage allows."""
        with self._as_slow_as(ids):
            return self._source.read_each(ids)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Read from the source behind, no faster than the storage allows."""
        with self._as_slow_as(ids):
            return self._source.read_packed(ids)

    def close(self) -> None:
        """Close the source behind."""
        self._source.close()

    @contextmanager
    def _as_slow_as(self, ids: npt.ArrayLike) -> Iterator[npt.NDArray[np.int64]]:
        """Make what happens inside take as long as reading ``ids`` from the slow storage.

        Gives how often each of them was read before, i64[n].
        """
        begin = time.monotonic()
        wanted = check_ids(ids, len(self))
        num_bytes = int(self.sizes[wanted].sum())
        with self._meter.locked():
            earlier = self._count(wanted)
            transfer = num_bytes * self._seconds_per_byte
            requests = len(wanted) * self._seconds_per_request
            free_at = self._meter.take(begin, np.array([transfer, requests]))
        try:
            yield earlier
        finally:
            latency = _makespan(self._latencies(wanted, earlier), self._concurrency)
            time.sleep(max(0.0, max(begin + latency, free_at) - time.monotonic()))

    def _count(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Count a read of each id; return how often each was read before."""
        earlier = self._reads.array[ids]
        np.add.at(self._reads.array, ids, 1)
        return earlier

    def _latencies(
        self, ids: npt.NDArray[np.uint32], earlier: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return the seconds that each request takes."""
        return self._latency * np.exp(self._tail * _normal(self._seed, ids, earlier))


def _makespan(latencies: npt.NDArray[np.float64], concurrency: int) -> float:
    """Return when the last request ends if each begins as soon as one of the lanes is free."""
    if len(latencies) <= concurrency:
        return float(latencies.max(initial=0.0))
    lanes = [0.0] * concurrency
    for latency in latencies.tolist():
        heapq.heapreplace(lanes, lanes[0] + latency)
    return max(lanes)


def _normal(
    seed: int, ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return a standard normal number for each (seed, id, count), by Box and Muller."""
    key = _key(seed, ids, counts)
    radius = np.sqrt(-2 * np.log((_mix(key) >> np.uint64(11)) * 2.0**-53 + 2.0**-54))
    return np.asarray(radius * np.cos(2 * np.pi * 2.0**-53 * (_mix(~key) >> np.uint64(11))))


def uniform(
    seed: int, ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, id, count), apart from those of the latencies."""
    key = _key(seed, ids, counts) ^ np.uint64(0x5851F42D4C957F2D)
    return np.asarray((_mix(key) >> np.uint64(11)) * 2.0**-53)


def _key(
    seed: int, ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return 64 scrambled bits for each (seed, id, count)."""
    key = _mix(ids.astype(np.uint64) ^ _mix(np.uint64(seed % 2**64)))
    return np.asarray(_mix(key + counts.astype(np.uint64)))


def _mix(value: Any) -> Any:
    """Scramble 64-bit integers: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class _Meter:
    """Until when each of the two limits is used up, on the clock that all processes share."""

    def __init__(self) -> None:
        self._free_at = SharedArray.create(2, np.float64, "meter")
        self._threads = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_free_at": self._free_at}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._threads = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock over threads and processes; the system frees that of a killed process."""
        with self._threads:
            # Opened again each time: an inherited descriptor would be the parent's lock as well.
            fd = os.open(Path(f"/proc/self/fd/{self._free_at.fileno()}"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    def take(self, now: float, seconds: npt.NDArray[np.float64]) -> float:
        """Use up each limit for so many seconds; return when the last of them is done."""
        free_at = self._free_at.array
        free_at[:] = np.maximum(free_at, now) + seconds
        return float(free_at.max()) if seconds.any() else now


class FaultySource(SlowSource):
    """Slow storage that also fails.

    Each read of a sample draws its lot: with the probability ``rates[fault]`` that fault
    happens to it, one at most. A sample named in ``always`` suffers its fault every time. The
    draw depends only on ``seed``, the sample and how often it was read before, in all processes
    together, so a run can be repeated, and a read that failed may succeed when it is repeated.

    Time, limits and counts of reads are those of :class:`SlowSource`. ``faults`` counts what was
    done, over all processes. Thread-safe; works in children of every start method.
    """

    def __init__(
        self,
        source: Source,
        *,
        rates: Mapping[str, float] | None = None,
        always: Mapping[int, str] | None = None,
        stall: float = 1.0,
        latency: float = 0.0,
        tail: float = 0.0,
        bandwidth: float | None = None,
        iops: float | None = None,
        concurrency: int = 16,
        seed: int = 0,
    ) -> None:
        """Put failing storage before ``source``.

        ``rates`` are probabilities by fault, ``always`` maps sample ids to faults, ``stall`` is
        in seconds; :data:`FAULTS` are the faults. The other arguments are those of
        :class:`SlowSource`. Raises :class:`ConfigError` for a fault that is not known,
        probabilities outside of 0 to 1 or above 1 in sum, a negative stall, or an id out of
        range.
        """
        super().__init__(
            source,
            latency=latency,
            tail=tail,
            bandwidth=bandwidth,
            iops=iops,
            concurrency=concurrency,
            seed=seed,
        )
        self._rates = _checked_rates(rates or {})
        self._always = _checked_always(always or {}, len(source))
        if not (math.isfinite(stall) and stall >= 0):
            raise ConfigError(f"stall={stall} is not possible: give seconds, 0 or more")
        self._stall = stall
        self._done = SharedArray.create(len(FAULTS), np.int64, "faults")

    @property
    def faults(self) -> dict[str, int]:
        """How often each fault has occurred so far, by all processes."""
        return dict(zip(FAULTS, self._done.array.tolist(), strict=True))

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return the samples; raises the error of the first one that failed."""
        data, offsets, errors = self.read_packed(ids)
        if errors:
            error = errors[min(errors)]
            error.ids = check_ids(ids, len(self))[sorted(errors)].tolist()
            raise error
        return unpack(data, offsets)

    def read_each(self, ids: npt.ArrayLike) -> tuple[list[bytes | None], Errors]:
        """Return the samples, None for each that failed."""
        data, offsets, errors = self.read_packed(ids)
        samples: list[bytes | None] = [*unpack(data, offsets)]
        for index in errors:
            samples[index] = None
        return samples, errors

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return the samples in one array, and their errors."""
        wanted = check_ids(ids, len(self))
        with self._as_slow_as(wanted) as earlier:
            lots = self._draw(wanted, earlier)
            data, offsets, errors = self._source.read_packed(wanted)
            if (lots == FAULTS.index("stall")).any():
                time.sleep(self._stall)
        errors = {**errors, **self._errors(wanted, lots)}
        return self._damage(lots, *without(errors, data, offsets))

    def _draw(
        self, ids: npt.NDArray[np.uint32], earlier: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the fault of each read, i64[n]; the number of faults means none. Counts them."""
        lots = np.searchsorted(self._rates, uniform(self._seed, ids, earlier), side="right")
        for index, sample in enumerate(ids.tolist()):
            lots[index] = self._always.get(sample, lots[index])
        with self._meter.locked():
            np.add.at(self._done.array, lots[lots < len(FAULTS)], 1)
        return lots

    def _errors(self, ids: npt.NDArray[np.uint32], lots: npt.NDArray[np.int64]) -> Errors:
        """Return the errors of the reads, by position."""
        errors: Errors = {}
        for index in np.flatnonzero(lots < len(_ERRORS)).tolist():
            kind, what = _ERRORS[FAULTS[lots[index]]]
            sample = int(ids[index])
            errors[index] = kind(f"{self.name(sample)}: {what} (on purpose)", [sample])
        return errors

    def _damage(
        self, lots: npt.NDArray[np.int64], data: Bytes, offsets: Offsets, errors: Errors
    ) -> PackedRead:
        """Flip bits and cut ends."""
        flipped, short = lots == FAULTS.index("flip"), lots == FAULTS.index("short")
        lengths = np.diff(offsets)
        if flipped.any():
            data = data.copy()
            middles = (offsets[:-1] + lengths // 2)[flipped & (lengths > 0)]
            data[middles] ^= 1
        if short.any():
            kept = np.where(short, lengths // 2, lengths)
            index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
            data, offsets = data[index < np.repeat(kept, lengths)], offsets_of(kept)
        return data, offsets, errors


def _checked_rates(rates: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Return the upper end of each fault's share of [0, 1), in the order of FAULTS."""
    _refuse_unknown(rates)
    shares = np.array([rates.get(fault, 0.0) for fault in FAULTS])
    if not ((shares >= 0).all() and shares.sum() <= 1 + 1e-9):
        raise ConfigError(f"rates={dict(rates)}: give probabilities whose sum is at most 1")
    return np.cumsum(shares)


def _checked_always(always: Mapping[int, str], num_samples: int) -> dict[int, int]:
    _refuse_unknown(always.values())
    check_ids(list(always), num_samples)
    return {sample: FAULTS.index(fault) for sample, fault in always.items()}


def _refuse_unknown(faults: Iterable[str]) -> None:
    for fault in faults:
        if fault not in FAULTS:
            raise ConfigError(f"the fault {fault!r} is not known: there are {', '.join(FAULTS)}")
