"""A plain-Python model of the arena: the same rules, none of the machinery.

The native arena is compared with it operation by operation; where the two differ, one of them
is wrong. It is also small enough to read when a rule is in doubt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.region import ReferenceGhost, ReferenceRegion
from reference.rules import ReferenceRules
from stoker.errors import ConfigError, SegmentError
from stoker.policy.base import Admission, Order, Pop, Region

# bytes-like objects, or (u8[total], i64[n+1] offsets)
Samples = Sequence[Any] | tuple[NDArray[np.uint8], NDArray[np.int64]]


class ReferenceArena:
    """The arena's interface and exact region rules, for one process, without shared memory.

    ``capacity_bytes`` counts payload bytes. One clock per arena: each touched sample of a
    ``get_many`` takes its next value, in batch order, and so does each insertion. Eviction
    happens only in a put. Equal keys leave in the order of their ids. Thread-safe.

    Raises :class:`~stoker.errors.ConfigError` for refused arguments (sizes, ids out of range,
    lengths that differ, unknown regions) and :class:`~stoker.errors.SegmentError` for any call
    after :meth:`close`.
    """

    def __init__(
        self, num_ids: int, capacity_bytes: int, mean_size: float = 1.0, *, seed: int = 0
    ) -> None:
        if num_ids < 1:
            raise ConfigError(f"num_ids={num_ids} is refused: give at least 1")
        if capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes={capacity_bytes} is refused: give at least 0")
        if not mean_size > 0:
            raise ConfigError(f"mean_size={mean_size} is refused: give bytes above 0")
        self.num_ids = num_ids
        self.capacity_bytes = capacity_bytes
        self.overhead_bytes = 0
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._rules = ReferenceRules(capacity_bytes, seed)
        self._rules.add(Region("main", 1.0), capacity_bytes)
        self._claims: set[int] = set()
        self._leases: list[tuple[int, int]] = []

    # Life cycle

    def close(self) -> None:
        """Drop everything; every later call but this one raises SegmentError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise SegmentError("this arena is closed: create or attach another one")
            yield

    # Regions

    def add_region(
        self,
        name: str,
        bytes: int,
        order: Order = "key",
        *,
        admission: Admission = "always",
        ties: bool = True,
        pop: Pop = "evict",
        visits: int = 0,
        promote_to: str | None = None,
        ghost: str | None = None,
        strict: bool = True,
        holds_bytes: bool = True,
    ) -> None:
        """Add a region with a budget of ``bytes``; the rules are those of ``policy.Region``.

        A strict region that holds samples takes its budget from what is free in ``main``.
        """
        rules = Region(
            name, 1.0, order, admission, ties, pop, visits, promote_to, ghost, strict, holds_bytes
        )
        with self._open():
            self._rules.carve(rules, bytes)

    def configure(self, regions: Sequence[Region]) -> None:
        """Replace the regions of an empty arena by a policy's; shares become bytes."""
        with self._open():
            self._rules.configure(regions)

    def resize_region(self, name: str, bytes: int) -> None:
        """Change a budget and evict what is over it; a strict ``main`` gives the difference."""
        with self._open():
            self._rules.resize(name, bytes)

    def divide(self, shares: Mapping[str, float]) -> None:
        """Share out anew, in proportion, the bytes that these strict regions have together."""
        with self._open():
            self._rules.divide(shares)

    # Batches

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples,
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> NDArray[np.bool_]:
        """Insert u32[n] ids one after the other; return bool[n], True where cached now.

        ``samples`` is a sequence of bytes-like objects or (u8[total], i64[n+1] offsets). An id
        that is cached already keeps its place; where the order is the caller's key, a given key
        replaces the old one. Samples put together are in flight together: none evicts another.
        ``overflow``: the region for what ``region`` refuses. A claim of what is refused everywhere
        is given back.
        """
        with self._open():
            wanted = self._ids(ids)
            payloads = _payloads(samples, len(wanted))
            given = _keys(keys, len(wanted))
            targets = [self._rules.region(name) for name in (region, overflow) if name]
            done = [
                any(self._put(i, sample, key, target) for target in targets)
                for i, sample, key in zip(wanted, payloads, given, strict=True)
            ]
            self._rules.in_flight.clear()
            self._claims.difference_update(wanted)
            self._changed.notify_all()
            return np.array(done, dtype=np.bool_)

    def _put(
        self, sample_id: int, sample: bytes, key: float | None, target: ReferenceRegion
    ) -> bool:
        new = sample_id not in self._rules.home
        done = self._rules.put(sample_id, sample, key, target)
        if done and new:
            self._rules.in_flight.add(sample_id)
        return done

    def get_many(
        self, ids: ArrayLike, into: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
        """Return data u8[total], offsets i64[n+1] and found bool[n]; hits touch their samples."""
        with self._open():
            wanted = self._ids(ids)
            found = [self._rules.touch(i) for i in wanted]
            parts = [self._rules.sample(i) for i in wanted]
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            data = np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8)
            if into is not None and len(data) <= len(into):
                into[: len(data)] = data
                data = into[: len(data)]
            return data, offsets, np.array(found, dtype=np.bool_)

    def contains(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[n]: is each id cached now? Touches nothing."""
        with self._open():
            return np.array([i in self._rules.home for i in self._ids(ids)], dtype=np.bool_)

    def discard(self, ids: ArrayLike) -> None:
        """Drop cached samples, leased ones as well; ids that are not cached are passed over."""
        with self._open():
            for i in self._ids(ids):
                self._rules.discard(i)

    def set_keys(self, ids: ArrayLike, keys: ArrayLike) -> None:
        """Set f64[n] keys of cached samples in regions ordered by the caller's key."""
        with self._open():
            wanted = self._ids(ids)
            for i, key in zip(wanted, _keys(keys, len(wanted)), strict=True):
                self._rules.set_key(i, key)

    def keys(self, ids: ArrayLike) -> NDArray[np.float64]:
        """Return f64[n]: the key, clock or count that orders each sample; NaN if not cached."""
        with self._open():
            wanted = self._ids(ids)
            home = self._rules.home
            shown = [home[i].public_key(i) if i in home else np.nan for i in wanted]
            return np.array(shown, dtype=np.float64)

    def put(self, id: int, sample: bytes, key: float | None = None) -> bool:
        """Insert one sample; see :meth:`put_many`."""
        return bool(self.put_many([id], [sample], None if key is None else [key])[0])

    def get(self, id: int) -> bytes | None:
        """Return one sample's bytes, or None."""
        data, _, found = self.get_many([id])
        return data.tobytes() if found[0] else None

    # Single flight

    def claim(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[n]: True where the caller is now the one who fetches this missing id."""
        with self._open():
            return np.array([self._claim(i) for i in self._ids(ids)], dtype=np.bool_)

    def abandon(self, ids: ArrayLike) -> None:
        """Give claims back; waiting callers are told to fetch for themselves."""
        with self._open():
            self._claims.difference_update(self._ids(ids))
            self._changed.notify_all()

    def are_coming(self, ids: ArrayLike) -> bool:
        """Return whether some of ``ids`` are claimed, and those that are not are cached."""
        with self._open():
            wanted = self._ids(ids)
            claimed = [i in self._claims for i in wanted]
            there = [i in self._rules.home for i in wanted]
        return any(claimed) and all(c or t for c, t in zip(claimed, there, strict=True))

    def wait(self, ids: ArrayLike, timeout: float) -> NDArray[np.bool_]:
        """Wait at most ``timeout`` seconds in all; bool[n], True where the id is cached now."""
        deadline = time.monotonic() + timeout
        with self._open():
            wanted = self._ids(ids)
            while not self._closed and any(i in self._claims for i in wanted):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
        return self.contains(ids)

    def _claim(self, sample_id: int) -> bool:
        free = sample_id not in self._rules.home and sample_id not in self._claims
        if free:
            self._claims.add(sample_id)
        return free

    # Places

    def move(self, ids: ArrayLike, region: str, keys: ArrayLike | None = None) -> NDArray[np.bool_]:
        """Move cached samples to ``region`` if it admits them; bool[n], True where there now."""
        with self._open():
            wanted = self._ids(ids)
            target = self._rules.region(region)
            given = _keys(keys, len(wanted))
            moved = [self._rules.move(i, target, key) for i, key in zip(wanted, given, strict=True)]
            return np.array(moved, dtype=np.bool_)

    def where(self, ids: ArrayLike) -> NDArray[np.uint8]:
        """Return u8[n]: the index of each sample's region, in their order; 255 if not cached."""
        with self._open():
            return np.array([self._rules.index(i) for i in self._ids(ids)], dtype=np.uint8)

    def copies(self, ids: ArrayLike, region: str) -> NDArray[np.uint32]:
        """Return u32[n]: which copy of each sample lies in ``region``; 0 if none does."""
        with self._open():
            members, copy = self._rules.region(region).members, self._rules.copy
            found = [copy[i] if i in members else 0 for i in self._ids(ids)]
            return np.array(found, dtype=np.uint32)

    def list(self, region: str) -> NDArray[np.uint32]:
        """Return u32[m], the ids cached in ``region``, ascending."""
        with self._open():
            return np.array(sorted(self._rules.region(region).members), dtype=np.uint32)

    # Leases

    def lease(self, ids: ArrayLike, position: int) -> bool:
        """Keep ids from being evicted until ``release`` reaches this position; always True."""
        with self._open():
            self._leases += [(position, i) for i in self._ids(ids)]
            self._rules.leased = {i for _, i in self._leases}
            return True

    def release(self, position: int) -> None:
        """Drop the leases whose position is at most ``position``."""
        with self._open():
            self._leases = [lease for lease in self._leases if lease[0] > position]
            self._rules.leased = {i for _, i in self._leases}

    # Counters and checks

    def stats(self) -> dict[str, Any]:
        """Return the counters and, under ``regions``, bytes, budget and entries of each."""
        with self._open():
            counters = ("hits", "misses", "inserts", "evictions", "rejected", "bypassed")
            faults = ("torn_reads", "repairs", "reclaimed", "corrupt")
            regions: dict[str, ReferenceRegion | ReferenceGhost]
            regions = {**self._rules.regions, **self._rules.ghosts}
            return {
                "capacity_bytes": self.capacity_bytes,
                "payload_bytes": self._rules.payload_bytes(),
                "overhead_bytes": self.overhead_bytes,
                "entries": len(self._rules.home),
                **{name: self._rules.counts[name] for name in counters + faults},
                "regions": {
                    name: {"bytes": r.bytes, "budget": r.budget, "entries": len(r)}
                    for name, r in regions.items()
                },
            }

    def verify(self) -> None:
        """Raise SegmentError if a derived number differs from what it is derived from."""
        with self._open():
            self._rules.verify()

    def _ids(self, ids: ArrayLike) -> Sequence[int]:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(f"ids of shape {array.shape}, {array.dtype} are refused: give u32[n]")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.num_ids:
            wrong = array[(array < 0) | (array >= self.num_ids)][0]
            raise ConfigError(f"id {wrong} is out of range: give ids from 0 to {self.num_ids - 1}")
        return [int(i) for i in array]


def _payloads(samples: Samples, count: int) -> list[bytes]:
    """Return one bytes object per sample, from either of the two forms."""
    if isinstance(samples, tuple) and len(samples) == 2 and isinstance(samples[1], np.ndarray):
        data, offsets = samples
        payloads = [np.asarray(data[a:b]).tobytes() for a, b in pairwise(offsets)]
    else:
        payloads = [_bytes_of(sample) for sample in samples]
    if len(payloads) != count:
        raise ConfigError(f"{len(payloads)} samples for {count} ids: give one for each")
    return payloads


def _bytes_of(sample: Any) -> bytes:
    return memoryview(sample).tobytes()


def _keys(keys: ArrayLike | None, count: int) -> list[float | None]:
    if keys is None:
        return [None] * count
    array = np.asarray(keys, dtype=np.float64)
    if array.shape != (count,):
        raise ConfigError(f"keys of shape {array.shape} for {count} ids: give one for each")
    if np.isnan(array).any():
        raise ConfigError("a key is NaN, which has no place in an order: give finite numbers")
    return [float(key) for key in array]
