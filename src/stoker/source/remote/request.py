"""What an engine is asked for, what it answers and counts, and which of Stoker's errors that is.

Ranges that lie close together are one request; since when nothing has been answered is known to all
processes that ask through one client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing import context
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceError, SourceUnavailable
from stoker.shared import SharedArray
from stoker.source.pace import Retry
from stoker.source.packed import Offsets
from stoker.source.remote.backend import Why

_ANSWERED, _SINCE, _LATEST = range(3)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Pieces of objects, to be laid one after the other."""

    keys: list[str]
    """The object of each piece."""
    starts: Offsets
    """Where each begins, i64[n]; negative for the whole object."""
    lengths: Offsets
    """Bytes of each, i64[n]."""
    sizes: Offsets
    """Bytes of the whole object as it was listed, i64[n]."""
    tags: npt.NDArray[np.uint64]
    """The object's version as it was listed, u64[n]."""

    def take(self, chosen: Sequence[int]) -> Wanted:
        """Return the pieces with these indices, in this order."""
        index = np.asarray(chosen, np.int64)
        return Wanted(
            [self.keys[i] for i in chosen],
            self.starts[index],
            self.lengths[index],
            self.sizes[index],
            self.tags[index],
        )


@dataclass(frozen=True)
class Failure:
    """Why a piece could not be had in the end. Pickles."""

    why: Why | None
    """None when the object is not the one that was listed."""
    message: str
    attempts: int
    seconds: float
    """From the first attempt to giving up."""


@dataclass
class Tally:
    """What was asked of the storage so far. Pickles."""

    requests: int = 0
    """Reads, second and repeated ones included; not listings."""
    failed: int = 0
    """Requests of any kind that failed, whether or not they were retried."""
    throttled: int = 0
    """Those of them that the storage throttled."""
    hedged: int = 0
    """Second requests for reads that were late."""
    received_bytes: int = 0
    """Bytes of all reads."""

    def __add__(self, other: Tally) -> Tally:
        """Return both together."""
        names = [field.name for field in fields(self)]
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))


def error_of(name: str, failure: Failure, ids: Sequence[int] = ()) -> SourceError:
    """Return the error for samples ``ids`` in the object ``name``.

    Raises :class:`ConfigError` where the credentials or the request itself are at fault: that is
    not a matter of these samples.
    """
    _raise_refused(name, failure)
    tried = f"{failure.attempts} attempts in {failure.seconds:.1f} s"
    kind: type[SourceError] = SourceUnavailable
    if failure.why is Why.NOT_FOUND:
        kind = SampleNotFound
        text = f"{name} is not there: put it back, or make the data set again, which lists it again"
    elif failure.why is None:
        kind = SampleCorrupt
        text = f"{name}: {failure.message}: make the data set again, which lists it again"
    elif failure.why is Why.CUT:
        kind = SampleCorrupt
        text = f"{name} did not arrive whole ({tried}); the last time: {failure.message}"
    else:
        text = f"{name} could not be read ({tried}); the last time: {failure.message}"
        if failure.why is Why.UNREACHABLE:
            text += "; check the address, the endpoint in storage_options and the network"
    return kind(text, ids)


def _raise_refused(name: str, failure: Failure) -> None:
    """Raise ConfigError if the credentials or the request itself are at fault."""
    if failure.why is Why.NO_CREDENTIALS:
        raise ConfigError(
            f"there are no credentials for {name}: {failure.message}; give them in "
            "storage_options or the environment, or skip_signature=True for public data"
        )
    if failure.why is Why.REFUSED:
        raise ConfigError(
            f"the storage refuses to give {name}, also after asking for new credentials: "
            f"{failure.message}; check the credentials (storage_options, environment), and "
            "whether the object exists: some storages hide that from those who may not list"
        )
    if failure.why is Why.INVALID:
        raise ConfigError(f"{name} cannot be requested like this: {failure.message}")


class Outage:
    """Whether something has ever answered, and since when everything fails, if it does.

    Children of any start method share it with their parent, so that an outage is one for all of
    them; any other copy knows no more than whether something has answered. Times are of
    ``time.monotonic()``. Thread-safe without a lock: each value is one aligned float, and of two
    writers at one instant either may win.
    """

    def __init__(self) -> None:
        self._hold(SharedArray.create(3, np.float64, "outage"))

    def _hold(self, shared: SharedArray) -> None:
        self.shared: SharedArray | None = shared
        """The memory, f64[3], to give to a process; None in one that was given it."""
        self._values: npt.NDArray[np.float64] = shared.array

    @classmethod
    def over(cls, memory: Any) -> Self:
        """Return the one that lies in ``memory``, a mapping of :attr:`shared`."""
        self = object.__new__(cls)
        self.shared, self._values = None, np.frombuffer(memory, np.float64, 3)
        return self

    def __getstate__(self) -> SharedArray | bool:
        # Memory can be passed on only to a process that is just being started.
        is_passed = self.shared is not None and context.get_spawning_popen() is not None
        return self.shared if is_passed and self.shared is not None else self.has_answered

    def __setstate__(self, state: SharedArray | bool) -> None:
        if isinstance(state, SharedArray):
            self._hold(state)
        else:
            self._hold(SharedArray.create(3, np.float64, "outage"))
            self._values[_ANSWERED] = state

    @property
    def has_answered(self) -> bool:
        """Whether a request was ever answered, if only by an error."""
        return bool(self._values[_ANSWERED])

    def answer(self) -> None:
        """Note that something answered."""
        if not self._values[_ANSWERED]:
            self._values[_ANSWERED] = 1.0

    def end(self) -> None:
        """Note that a request succeeded."""
        self.answer()
        if self._values[_SINCE]:
            self._values[_SINCE] = 0.0

    def fail(self, retry: Retry) -> float:
        """Note that a request failed; return when this outage began.

        One in which nothing has failed for as long as ``retry.deadline`` is another's business.
        """
        now, since = time.monotonic(), float(self._values[_SINCE])
        if not since or now - self._values[_LATEST] > retry.deadline:
            self._values[_SINCE] = since = now
        self._values[_LATEST] = now
        return since

    def limit(self, retry: Retry, since: float, called: float, unreachable: bool) -> float:
        """Return until when a call that began at ``called`` is to be tried again."""
        short = min(retry.unanswered, retry.deadline)
        if unreachable and not self.has_answered:
            return since + short
        limit = since + retry.deadline
        return max(limit, called + short) if called > since else limit


@dataclass(frozen=True, eq=False)
class Requests:
    """R requests that cover n ranges."""

    shards: npt.NDArray[np.uint32]
    """The object of each request, u32[R]."""
    starts: Offsets
    """Where it begins, i64[R]."""
    lengths: Offsets
    """Bytes of it, i64[R]."""
    request_of: Offsets
    """The request that covers each range, i64[n]."""


def coalesce(
    shards: npt.NDArray[np.uint32], starts: Offsets, ends: Offsets, gap: int, largest: int
) -> Requests:
    """Return requests that cover the ranges ``[starts, ends)`` of these ``shards``.

    Ranges of one shard with at most ``gap`` bytes between them come in one request, as long as
    it has at most ``largest`` bytes; a single range may be larger.
    """
    order = np.lexsort((starts, shards))
    if not len(order):
        none = np.empty(0, np.int64)
        return Requests(none.astype(np.uint32), none, none, none)
    of, begins, stops = shards[order], starts[order], ends[order]
    is_other = of[1:] != of[:-1]
    firsts = np.append(0, 1 + np.flatnonzero(is_other | (begins[1:] - stops[:-1] > gap)))
    lengths = stops[np.append(firsts[1:], len(order)) - 1] - begins[firsts]
    if lengths.max() > largest or not (is_other | (np.diff(stops) >= 0)).all():
        return _one_by_one(order, shards, starts, ends, gap, largest)
    request_of = np.empty(len(order), np.int64)
    request_of[order] = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(order)))
    return Requests(of[firsts], begins[firsts], lengths, request_of)


def _one_by_one(
    order: npt.NDArray[np.int64],
    shards: npt.NDArray[np.uint32],
    starts: Offsets,
    ends: Offsets,
    gap: int,
    largest: int,
) -> Requests:
    """Return the requests where ranges lie in others, or some would be too large."""
    request_of = np.empty(len(order), np.int64)
    joined: list[tuple[int, int, int]] = []
    ranges = zip(
        order.tolist(),
        shards[order].tolist(),
        starts[order].tolist(),
        ends[order].tolist(),
        strict=True,
    )
    shard, begin, end = -1, 0, 0
    for index, here, start, stop in ranges:
        close = here == shard and start - end <= gap and max(end, stop) - begin <= largest
        if not close:
            if shard >= 0:
                joined.append((shard, begin, end))
            shard, begin, end = here, start, stop
        end = max(end, stop)
        request_of[index] = len(joined)
    if shard >= 0:
        joined.append((shard, begin, end))
    table = np.array(joined, np.int64).reshape(-1, 3)
    return Requests(
        table[:, 0].astype(np.uint32), table[:, 1].copy(), table[:, 2] - table[:, 1], request_of
    )
