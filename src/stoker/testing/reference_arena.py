"""A plain-Python model of the arena: the same rules, none of the machinery.

The native arena is compared with it operation by operation; where the two differ, one of them
is wrong. It is also small enough to read when a rule is in doubt.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError, SegmentError
from stoker.policy.base import Admission, Order, Pop, Region
from stoker.testing.reference_region import Key, Member, ReferenceGhost, ReferenceRegion

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
        self._random = Random(seed)
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._clock = 0
        self._home: dict[int, ReferenceRegion] = {}
        self._claims: set[int] = set()
        self._leases: Counter[int] = Counter()
        self._lease_positions: list[tuple[int, int]] = []
        self._counts: Counter[str] = Counter()
        self._regions: dict[str, ReferenceRegion] = {}
        self._ghosts: dict[str, ReferenceGhost] = {}
        self.add_region("main", capacity_bytes)

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
        """Add a region with a budget of ``bytes``; the rules are those of ``policy.Region``."""
        rules = Region(
            name, 1.0, order, admission, ties, pop, visits, promote_to, ghost, strict, holds_bytes
        )
        with self._open():
            if name in self._regions or name in self._ghosts:
                raise ConfigError(f"region {name!r} exists already: give another name")
            if bytes < 0:
                raise ConfigError(f"region {name!r}: bytes={bytes} is refused: give at least 0")
            if holds_bytes:
                self._regions[name] = ReferenceRegion(rules, bytes, self._random)
            else:
                self._ghosts[name] = ReferenceGhost(rules, bytes)

    def configure(self, regions: Sequence[Region]) -> None:
        """Replace the regions of an empty arena by a policy's; shares become bytes."""
        with self._open():
            if self._home:
                raise ConfigError(f"{len(self._home)} samples are cached: configure before the put")
            self._regions, self._ghosts = {}, {}
            for rules in regions:
                fields = {k: v for k, v in vars(rules).items() if k != "share"}
                self.add_region(bytes=int(rules.share * self.capacity_bytes), **fields)
            for region in self._regions.values():
                self._resolve(region.rules)

    def resize_region(self, name: str, bytes: int) -> None:
        """Change a budget; nothing is evicted before the next put."""
        with self._open():
            if bytes < 0:
                raise ConfigError(f"region {name!r}: bytes={bytes} is refused: give at least 0")
            self._any_region(name).budget = bytes

    def _resolve(self, rules: Region) -> None:
        if rules.promote_to is not None:
            self._region(rules.promote_to)
        if rules.ghost is not None and rules.ghost not in self._ghosts:
            raise ConfigError(f"region {rules.name!r}: ghost={rules.ghost!r} is not such a region")

    def _region(self, name: str) -> ReferenceRegion:
        if name not in self._regions:
            known = ", ".join(self._regions)
            raise ConfigError(f"region {name!r} holds no samples here: use one of {known}")
        return self._regions[name]

    def _any_region(self, name: str) -> ReferenceRegion | ReferenceGhost:
        return self._ghosts[name] if name in self._ghosts else self._region(name)

    # Batches

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples,
        keys: ArrayLike | None = None,
        region: str = "main",
    ) -> NDArray[np.bool_]:
        """Insert u32[n] ids one after the other; return bool[n], True where cached now.

        ``samples`` is a sequence of bytes-like objects or (u8[total], i64[n+1] offsets).
        An id that is cached already keeps its place; where
        the order is the caller's key, a given key replaces the old one.
        """
        with self._open():
            wanted = self._ids(ids)
            payloads = _payloads(samples, len(wanted))
            given = _keys(keys, len(wanted))
            target = self._region(region)
            done = [
                self._put(i, sample, key, target)
                for i, sample, key in zip(wanted, payloads, given, strict=True)
            ]
            self._changed.notify_all()
            return np.array(done, dtype=np.bool_)

    def get_many(
        self, ids: ArrayLike
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
        """Return data u8[total], offsets i64[n+1] and found bool[n]; hits touch their samples."""
        with self._open():
            wanted = self._ids(ids)
            found = [self._touch(i) for i in wanted]
            parts = [self._sample(i) for i in wanted]
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            data = np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8)
            return data, offsets, np.array(found, dtype=np.bool_)

    def contains(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[n]: is each id cached now? Touches nothing."""
        with self._open():
            return np.array([i in self._home for i in self._ids(ids)], dtype=np.bool_)

    def discard(self, ids: ArrayLike) -> None:
        """Drop cached samples, leased ones as well; ids that are not cached are passed over."""
        with self._open():
            for i in self._ids(ids):
                if i in self._home:
                    self._home.pop(i).remove(i)

    def set_keys(self, ids: ArrayLike, keys: ArrayLike) -> None:
        """Set f64[n] keys of cached samples in regions ordered by the caller's key."""
        with self._open():
            wanted = self._ids(ids)
            for i, key in zip(wanted, _keys(keys, len(wanted)), strict=True):
                self._set_key(i, key)

    def keys(self, ids: ArrayLike) -> NDArray[np.float64]:
        """Return f64[n]: the key, clock or count that orders each sample; NaN if not cached."""
        with self._open():
            wanted = self._ids(ids)
            return np.array(
                [self._home[i].public_key(i) if i in self._home else np.nan for i in wanted],
                dtype=np.float64,
            )

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
        free = sample_id not in self._home and sample_id not in self._claims
        if free:
            self._claims.add(sample_id)
        return free

    # Leases

    def lease(self, ids: ArrayLike, position: int) -> None:
        """Keep ids from being evicted until ``release`` reaches this position of the plan."""
        with self._open():
            wanted = self._ids(ids)
            self._leases.update(wanted)
            self._lease_positions += [(i, position) for i in wanted]

    def release(self, position: int) -> None:
        """Drop the leases whose position is at most ``position``."""
        with self._open():
            self._lease_positions = [p for p in self._lease_positions if p[1] > position]
            self._leases = Counter(i for i, _ in self._lease_positions)

    # Counters and checks

    def stats(self) -> dict[str, Any]:
        """Return the counters and, under ``regions``, bytes, budget and entries of each."""
        with self._open():
            counters = ("hits", "misses", "inserts", "evictions", "rejected", "bypassed")
            faults = ("torn_reads", "repairs", "reclaimed", "corrupt")
            return {
                "capacity_bytes": self.capacity_bytes,
                "payload_bytes": self._payload_bytes(),
                "overhead_bytes": self.overhead_bytes,
                "entries": len(self._home),
                **{name: self._counts[name] for name in counters + faults},
                "regions": {
                    name: {"bytes": r.bytes, "budget": r.budget, "entries": len(r.members)}
                    for name, r in self._regions.items()
                }
                | {
                    name: {"bytes": g.bytes, "budget": g.budget, "entries": len(g.lengths)}
                    for name, g in self._ghosts.items()
                },
            }

    def verify(self) -> None:
        """Raise SegmentError if a derived number differs from what it is derived from."""
        with self._open():
            if self._payload_bytes() > self.capacity_bytes:
                raise SegmentError(f"{self._payload_bytes()} bytes exceed {self.capacity_bytes}")
            for name, region in self._regions.items():
                if region.bytes != sum(len(m.sample) for m in region.members.values()):
                    raise SegmentError(f"region {name!r} counts {region.bytes} bytes wrongly")
                if any(self._home.get(i) is not region for i in region.members):
                    raise SegmentError(f"region {name!r} holds samples listed elsewhere")
            if len(self._home) != sum(len(r.members) for r in self._regions.values()):
                raise SegmentError(f"{len(self._home)} samples are listed, regions hold others")

    # The rules

    def _put(
        self, sample_id: int, sample: bytes, given: float | None, asked: ReferenceRegion
    ) -> bool:
        if sample_id in self._home:
            self._set_key(sample_id, given)
            return True
        target = self._target(sample_id, asked, len(sample))
        if target is None or not self._admit(target, len(sample), given):
            self._counts["rejected"] += 1
            return False
        clock = self._tick()
        target.add(sample_id, Member(sample, target.key_at(clock, given)))
        self._home[sample_id] = target
        self._claims.discard(sample_id)
        self._counts["inserts"] += 1
        return True

    def _target(
        self, sample_id: int, asked: ReferenceRegion, length: int
    ) -> ReferenceRegion | None:
        """Return the region a newcomer goes to; None if it could never fit there.

        The budget of the region asked for binds even where the ghost sends the sample on: so it
        is in S3-FIFO, and the cache does not treat an id differently the second time.
        """
        if length > self.capacity_bytes or length > asked.budget:
            return None
        ghost = self._ghosts.get(asked.rules.ghost or "")
        target = asked
        if ghost is not None and ghost.forget(sample_id):
            target = self._region(asked.rules.promote_to or "")
        return None if target.rules.strict and length > target.budget else target

    def _admit(self, target: ReferenceRegion, length: int, given: float | None) -> bool:
        """Make room if the region's admission rule lets the newcomer have it."""
        if target.rules.admission == "while_room":
            return not self._crowded(target, length)
        if target.rules.admission == "beats_victims":
            victims = self._beaten(target, length, target.key_at(self._clock + 1, given))
            for i in victims or ():
                self._evict(target, i)
            return victims is not None
        while self._crowded(target, length):
            if not (self._pop_one(target) if target.rules.strict else self._pop_borrowed()):
                return False
        return True

    def _crowded(self, region: ReferenceRegion, length: int) -> bool:
        over = self._payload_bytes() + length > self.capacity_bytes
        return over or (region.rules.strict and region.bytes + length > region.budget)

    def _beaten(self, region: ReferenceRegion, length: int, key: Key) -> list[int] | None:
        """Return the victims, smallest key first, or None if one beats the newcomer."""
        short = max(
            region.bytes + length - region.budget,
            self._payload_bytes() + length - self.capacity_bytes,
        )
        victims: list[int] = []
        for i in region.ordered(self._leases):
            if short <= 0:
                break
            member = region.members[i]
            if member.key > key or (member.key == key and not region.rules.ties):
                return None
            victims.append(i)
            short -= len(member.sample)
        return victims if short <= 0 else None

    def _pop_borrowed(self) -> bool:
        """Evict one sample among the regions that are not strict; False if none can leave."""
        shared = [r for r in self._regions.values() if not r.rules.strict]
        over = [r for r in reversed(shared) if r.bytes > r.budget]
        # A region whose samples are all leased is passed over: nothing waits for room.
        for region in over + shared:
            if region.smallest(self._leases) is not None:
                return self._pop_one(region)
        return False

    def _pop_one(self, region: ReferenceRegion) -> bool:
        """Pop until a sample was evicted or none may leave; False if nothing changed."""
        changed = False
        while True:
            did, chosen = region.pop(self._leases, self._tick)
            if did == "evicted":
                self._evict(region, chosen)
                return True
            if did == "nothing":
                return changed
            if did == "promoted":
                self._promote(region, chosen)
            changed = True

    def _evict(self, region: ReferenceRegion, sample_id: int) -> None:
        member = region.remove(sample_id)
        del self._home[sample_id]
        region.after_eviction()
        self._counts["evictions"] += 1
        if region.rules.ghost is not None:
            self._ghosts[region.rules.ghost].remember(sample_id, len(member.sample))

    def _promote(self, region: ReferenceRegion, sample_id: int) -> None:
        target = self._region(region.rules.promote_to or "")
        member = region.remove(sample_id)
        target.add(sample_id, Member(member.sample, target.key_at(self._tick(), None)))
        self._home[sample_id] = target

    # Small parts

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _payload_bytes(self) -> int:
        return sum(region.bytes for region in self._regions.values())

    def _sample(self, sample_id: int) -> bytes:
        home = self._home.get(sample_id)
        return b"" if home is None else home.members[sample_id].sample

    def _touch(self, sample_id: int) -> bool:
        home = self._home.get(sample_id)
        if home is not None:
            home.touch(sample_id, self._tick())
        self._counts["misses" if home is None else "hits"] += 1
        return home is not None

    def _set_key(self, sample_id: int, key: float | None) -> None:
        home = self._home.get(sample_id)
        if home is not None and home.rules.order == "key" and key is not None:
            home.members[sample_id].key = (key,)

    def _ids(self, ids: ArrayLike) -> list[int]:
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
