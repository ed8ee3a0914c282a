"""A source that fails as storage fails, deliberately and reproducibly."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.base import Errors, PackedRead, Source, check_ids, without
from stoker.source.packed import Bytes, Offsets, offsets_of, unpack
from stoker.testing.slow_source import SlowSource, uniform

FAULTS = ("unavailable", "not_found", "corrupt", "short", "flip", "stall")
"""What can happen to a read: three errors by name, a sample that lacks its end, a flipped bit
(neither is reported), and a long wait."""

_ERRORS: dict[str, tuple[type[SourceError], str]] = {
    "unavailable": (SourceUnavailable, "the storage did not answer"),
    "not_found": (SampleNotFound, "it is not there"),
    "corrupt": (SampleCorrupt, "its bytes cannot be used"),
}


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
            place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
            data, offsets = data[place < np.repeat(kept, lengths)], offsets_of(kept)
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
