"""The cache segment that processes share: batches of samples in and out by dense ids."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker._core import ABI, Rooms, View, segment_bytes
from stoker._core import Arena as Core
from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.node.descriptors import Handle
from stoker.node.memory import read_memory
from stoker.policy.base import Admission, Order, Pop, Region
from stoker.types import format_bytes

Samples = Sequence[Any] | tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Bytes-like objects, or ``(data u8[total], offsets i64[n+1])``."""

_MAX_IDS = 2**32 - 2
_MAX_BYTES = 2**60
_LONGEST = 1e9  # seconds that fit into the clock's nanoseconds


def turns_of(ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return u32[n]: of samples with equal keys, the one whose turn is smallest leaves first.

    A fixed order, independent of that of the ids, which often come class by class.
    """
    return ids * np.uint32(0x9E3779B1)


class Arena:
    """A cache of samples in shared memory, or in a file, with named regions and byte budgets.

    ``num_ids``: ids are 0 to ``num_ids - 1``. ``capacity_bytes`` counts payload; the rest
    is :attr:`overhead_bytes`. ``mean_size``: expected bytes of a sample, from which the block
    size follows. ``path``: a file to keep the samples in (it is created, or what it holds is
    recovered, the youngest first if not all may stay); None: memory, whose pages are all reserved
    now. ``exact``: eviction follows its order exactly at any cost, for tests; otherwise one
    eviction looks at a bounded number of samples. ``seed``: for random eviction. ``limit_bytes``:
    payload that fits at first, see :meth:`limit`; by default all.

    A new arena has one region, ``"main"``, with all the capacity, ordered by the caller's keys:
    the smallest leaves first. An arena never reads a source and never waits for room.

    Every method is safe in any thread of any process that holds the arena, and works after a
    fork. Arrays are checked: ids out of range and lengths that differ raise
    :class:`~stoker.errors.ConfigError`. After :meth:`close` everything raises
    :class:`~stoker.errors.SegmentError`. Construction raises
    :class:`~stoker.errors.CapacityError` when there is too little memory or disk space, and
    :class:`~stoker.errors.SegmentError` for a file that is not this arena's.
    """

    def __init__(
        self,
        num_ids: int,
        capacity_bytes: int,
        mean_size: float = 1.0,
        path: str | os.PathLike[str] | None = None,
        *,
        exact: bool = False,
        seed: int = 0,
        limit_bytes: int | None = None,
    ) -> None:
        check_sizes(num_ids, capacity_bytes, mean_size)
        mean = max(1, round(mean_size))
        limit = capacity_bytes if limit_bytes is None else min(limit_bytes, capacity_bytes)
        needed = memory_needed(num_ids, capacity_bytes, mean, limit, on_disk=path is not None)
        available = read_memory().available
        if needed > available:
            raise CapacityError(
                f"a cache of {format_bytes(limit)} for {num_ids} samples takes "
                f"{format_bytes(needed)} of memory, and {format_bytes(available)} are free here "
                "(machine and cgroup limits together): ask for a smaller cache"
            )
        self._core = Core.create(
            num_ids,
            capacity_bytes,
            mean,
            "" if path is None else str(Path(path)),
            exact,
            seed,
            limit=limit,
        )

    @classmethod
    def attach(cls, handle: Handle) -> Self:
        """Join the arena that ``handle`` came from; the handle's descriptors are copied.

        Raises :class:`~stoker.errors.SegmentError` for a segment of another version, and for
        descriptors that are none of an arena's.
        """
        if len(handle.fds) not in (1, 2):
            raise SegmentError(f"fds={handle.fds} are not a handle's: use an open arena's handle")
        fds: list[int] = []
        try:
            fds.extend(map(os.dup, handle.fds))
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise SegmentError(
                f"fds={handle.fds} are not open here ({error.strerror}): keep the arena that the "
                "handle came from open, and pass handles only while a process is spawned"
            ) from error
        self = cls.__new__(cls)
        self._core = Core.attach(fds[0], fds[1] if len(fds) > 1 else -1)
        return self

    @property
    def handle(self) -> Handle:
        """What another process needs to join; valid while this arena is open."""
        return Handle(tuple(fd for fd in self._core.descriptors if fd >= 0), {"abi": ABI})

    @property
    def num_ids(self) -> int:
        """Number of ids."""
        return self._core.num_ids

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes that fit."""
        return self._core.capacity_bytes

    @property
    def mean_size(self) -> int:
        """Expected bytes of a sample, as given at creation."""
        return self._core.mean_size

    @property
    def io_errors(self) -> int:
        """Failed reads and writes of the disk, of all processes so far; takes no lock."""
        return self._core.io_errors

    @property
    def overhead_bytes(self) -> int:
        """Bytes of memory taken beyond the payload: entries, heaps, and room to place extents."""
        return max(0, self._core.total_bytes - self._core.capacity_bytes)

    def close(self) -> None:
        """Release the arena; calls in other threads end first. The last holder frees it."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # Batches

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples,
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> NDArray[np.bool_]:
        """Offer samples for ids u32[n]; return bool[n], True where one is in the cache now.

        ``keys`` f64[n] order regions of order ``"key"`` (None: the time of insertion).
        ``overflow``: the region for samples that ``region`` rejects. An id that
        is cached already keeps its bytes and takes the new key. A sample that is rejected (it
        does not fit, or its victims outrank it) gives its claim back. If the lock cannot be
        acquired within 50 ms nothing is inserted, and ``bypassed`` counts it.
        """
        wanted, values = self._ids(ids), _keys(keys)
        if _are_packed(samples):
            return self._core.put_packed(wanted, *_packed(*samples), values, region, overflow)
        return self._core.put(wanted, samples, values, region, overflow)

    def reserve(
        self,
        ids: ArrayLike,
        sizes: NDArray[np.int64],
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> Rooms:
        """Return room for samples of these ``sizes`` i64[n] that are on their way.

        Placed as :meth:`put_many` does, before their bytes are there: others see them as claimed
        until :meth:`Rooms.settle`. One that finds no room (``Rooms.reserved()``, bool[n]) keeps its
        claim. Rooms that are not settled are given up when the object goes, or its process ends.
        In memory only; else :class:`~stoker.errors.ConfigError`.
        """
        return self._core.reserve(self._ids(ids), sizes, _keys(keys), region, overflow)

    def exchange_many(
        self,
        ids: ArrayLike,
        data: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> tuple[
        NDArray[np.bool_],
        NDArray[np.uint32],
        NDArray[np.uint8],
        NDArray[np.int64],
        NDArray[np.float64],
    ]:
        """Put packed samples as :meth:`put_many` does, and return what they evicted.

        Returns ``(admitted bool[n], ids u32[m], data u8[total], offsets i64[m+1], keys f64[m])``:
        the m evicted samples, for a tier below, and what ordered them here.
        """
        return self._core.exchange(
            self._ids(ids), *_packed(data, offsets), _keys(keys), region, overflow
        )

    def get_many(
        self, ids: ArrayLike, into: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
        """Return data u8[total], offsets i64[n+1] and found bool[n].

        Sample i is ``data[offsets[i]:offsets[i + 1]]``, empty where it was not found. No lock is
        taken; a sample that changed while it was copied counts as not found. ``data`` is the
        beginning of ``into`` (``u8[m]``, writable and contiguous), where it has room.
        """
        data, offsets, found = self._core.get(self._ids(ids), into)
        if data is None:
            assert into is not None
            data = into[: int(offsets[-1])]
        return data, offsets, found

    def put(self, id: int, sample: Any, key: float | None = None) -> bool:
        """Offer one sample; see :meth:`put_many`."""
        return bool(self.put_many([id], [sample], None if key is None else [key])[0])

    def get(self, id: int) -> bytes | None:
        """Return one sample's bytes, or None."""
        data, _, found = self.get_many([id])
        return data.tobytes() if found[0] else None

    def contains(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[n]: is each id cached now? Touches nothing."""
        return self._core.contains(self._ids(ids))

    def find_lacking(
        self, ids: ArrayLike, marks: NDArray[np.uint32], stamp: int
    ) -> NDArray[np.int64]:
        """Return i64[m]: where in ``ids`` those are that are not cached now, and not marked.

        ``marks`` u32[N] of all ids; one counts that is ``stamp`` or more.
        """
        return self._core.find_lacking(self._ids(ids), marks, stamp)

    def discard(self, ids: ArrayLike) -> None:
        """Drop cached samples, leased ones as well; ids that are not cached are skipped."""
        self._core.discard(self._ids(ids))

    def discard_from(self, region: str, ids: ArrayLike) -> None:
        """Drop those of ``ids`` that are in ``region`` and that no process leases."""
        self._core.discard_from(region, self._ids(ids))

    def set_keys(self, ids: ArrayLike, keys: ArrayLike) -> None:
        """Set the keys f64[n] of those ids that are in regions of order ``"key"``."""
        self._core.set_keys(self._ids(ids), _as_keys(keys))

    def keys(self, ids: ArrayLike) -> NDArray[np.float64]:
        """Return f64[n]: the key, clock or count that orders each sample; NaN if not cached."""
        return self._core.keys(self._ids(ids))

    # Single flight

    def claim(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[n]: True where the caller is now the one process to fetch a missing id.

        A claim ends with :meth:`put_many`, with :meth:`abandon`, or with the process.
        """
        return self._core.claim(self._ids(ids))

    def abandon(self, ids: ArrayLike) -> None:
        """Give this process's claims back; waiting processes are told."""
        self._core.abandon(self._ids(ids))

    def are_coming(self, ids: ArrayLike) -> bool:
        """Return whether some of ``ids`` are claimed, and those that are not are cached."""
        return self._core.are_coming(self._ids(ids))

    def wait(self, ids: ArrayLike, timeout: float) -> NDArray[np.bool_]:
        """Wait for others' claims, ``timeout`` seconds in all; bool[n], True where cached now.

        False: the claimant gave up, died or is too slow, so the caller reads the source itself.
        """
        if not timeout >= 0:
            raise ConfigError(f"timeout={timeout} is invalid: give 0 or more seconds")
        return self._core.wait(self._ids(ids), min(timeout, _LONGEST))

    # Leases

    def lease(self, ids: ArrayLike, position: int) -> bool:
        """Keep ids from being evicted until :meth:`release` reaches ``position`` of the plan.

        Positions must not decrease from call to call. The leases end with the process at the
        latest. False when not all could be leased: those may be evicted, which is slower, never
        wrong.
        """
        return self._core.lease(self._ids(ids), position)

    def release(self, position: int) -> None:
        """Drop this process's leases for positions up to ``position``."""
        self._core.release(position)

    # Places

    def move(self, ids: ArrayLike, region: str, keys: ArrayLike | None = None) -> NDArray[np.bool_]:
        """Move cached samples to ``region``; return bool[n], True where one is there now.

        No bytes are copied. The region admits a sample by its rules and evicts for it, as in a
        put; one that is rejected stays where it was. ``keys`` f64[n] order a region of order
        ``"key"``; None: between two of these a sample keeps its key, else it counts as inserted
        now. Nothing else moves a sample: a put of an id that is cached in another region leaves
        it there. If the lock cannot be acquired within 50 ms nothing is moved.
        """
        return self._core.move(self._ids(ids), region, _keys(keys))

    def where(self, ids: ArrayLike) -> NDArray[np.uint8]:
        """Return u8[n]: the index of each sample's region, in their order; 255 if not cached."""
        return self._core.where(self._ids(ids))

    def copies(self, ids: ArrayLike, region: str) -> NDArray[np.uint32]:
        """Return u32[n]: which copy of each sample lies in ``region``; 0 if none does.

        The number grows each time that the sample comes into the cache, and stays while it is
        there, in whichever region.
        """
        return self._core.copies(self._ids(ids), region)

    def list(self, region: str) -> NDArray[np.uint32]:
        """Return u32[m], the ids cached in ``region``, ascending.

        Samples that enter or leave meanwhile may be included or not.
        """
        return self._core.list(region)

    # Regions

    def configure(self, regions: Sequence[Region]) -> None:
        """Replace the regions of an arena by a policy's; shares become bytes.

        Nothing may have been put into it yet. What was recovered from a file goes to the first
        region, the oldest being the first to leave; what exceeds its budget is evicted.
        """
        # A share that is a quotient of bytes may come out a hair short of them: what is meant to
        # hold all samples must hold the last one too.
        self._core.configure(
            [_rules(r, int(r.share * self.capacity_bytes + 1e-3)) for r in regions]
        )

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
        """Carve a region of ``bytes`` out of ``"main"``; the rules are those of ``Region``."""
        if bytes < 0:
            raise ConfigError(f"region {name!r}: bytes={bytes} is invalid: give at least 0")
        region = Region(
            name, 1.0, order, admission, ties, pop, visits, promote_to, ghost, strict, holds_bytes
        )
        self._core.add_region(_rules(region, bytes))

    def resize_region(self, name: str, bytes: int) -> None:
        """Change a region's budget now; what is over it is evicted.

        ``"main"``, where there is one, gives or takes the difference.
        """
        if bytes < 0:
            raise ConfigError(f"region {name!r}: bytes={bytes} is invalid: give at least 0")
        self._core.resize_region(name, bytes)

    def divide(self, shares: Mapping[str, float]) -> None:
        """Redivide, in proportion, the bytes that the named regions have together.

        Done at once: processes that ask for the same shares at the same time agree. What is over
        a budget is evicted; the first region gets what rounding leaves. ConfigError for a share
        that is negative or not finite, shares that are all 0, and regions that borrow or hold no
        samples.
        """
        self._core.divide([*shares], [float(share) for share in shares.values()])

    # Memory and disk

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes now."""
        return self._core.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that its file takes now; 0 for an arena in memory."""
        return self._core.disk_bytes

    @property
    def limit_bytes(self) -> int:
        """Payload bytes that fit now."""
        return self._core.limit_bytes

    def limit(self, bytes: int, *, patience: float = math.inf) -> int:
        """Let no more than so many payload bytes fit from now on, of :attr:`capacity_bytes`.

        Budgets of regions shrink in proportion; what is over them is evicted, and the memory or
        disk given back to the system or taken again. Samples that lie in what is given back are
        copied first; those for which ``patience`` seconds were too few are evicted. Returns
        :attr:`memory_bytes`, on disk :attr:`disk_bytes`: more than meant while a sample is being
        written that is in the way, or where a file system takes nothing back; less where there is
        no more. The next call mends that. ConfigError below 0.
        """
        if bytes < 0:
            raise ConfigError(f"bytes={bytes} is invalid: give 0 or more")
        core, seconds = self._core, min(patience, _LONGEST)
        if core.disk_bytes:
            return core.limit(bytes, seconds)
        wanted = memory_needed(self.num_ids, self.capacity_bytes, self.mean_size, bytes)
        if (more := wanted - core.memory_bytes) > 0 and more > (free := read_memory().available):
            bytes = self.limit_bytes + int((bytes - self.limit_bytes) * free / more)
        return core.limit(bytes, seconds)

    # Care

    def stats(self) -> dict[str, Any]:
        """Return the counters of all processes together, and per region bytes and budget."""
        return self._core.stats()

    def region_stats(self, region: str) -> dict[str, int]:
        """Return what :meth:`stats` says of one region: its ``bytes``, ``budget``, ``entries``."""
        return self._core.region_stats(region)

    def verify(self) -> None:
        """Check every invariant of the segment; raises SegmentError with the first broken one."""
        self._core.verify()

    def reclaim(self) -> None:
        """Take back now what dead processes held; it happens by itself about once a second."""
        self._core.reclaim()

    def _ids(self, ids: ArrayLike) -> NDArray[np.uint32]:
        if isinstance(ids, np.ndarray) and ids.dtype == np.uint32 and ids.ndim == 1:
            return np.ascontiguousarray(ids)
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(f"ids of shape {array.shape}, {array.dtype} are invalid: give u32[n]")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.num_ids:
            wrong = array[(array < 0) | (array >= self.num_ids)][0]
            raise ConfigError(f"id {wrong} is out of range: give ids from 0 to {self.num_ids - 1}")
        return array.astype(np.uint32)


def _keys(keys: ArrayLike | None) -> NDArray[np.float64] | None:
    return None if keys is None else _as_keys(keys)


def _are_packed(samples: Samples) -> TypeGuard[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    # Two samples that are arrays may come as a tuple too; offsets are never bytes.
    pair = isinstance(samples, tuple) and len(samples) == 2 and isinstance(samples[1], np.ndarray)
    return pair and samples[1].dtype != np.uint8


def _packed(
    data: NDArray[np.uint8], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    # Checked, since a conversion would change numbers without a word.
    data, offsets = np.asarray(data), np.asarray(offsets)
    wrong = data.dtype != np.uint8 or offsets.dtype.kind not in "iu"
    if wrong or (data.ndim, offsets.ndim) != (1, 1):
        raise ConfigError(
            f"data of shape {data.shape}, {data.dtype} with offsets of shape {offsets.shape}, "
            f"{offsets.dtype} are invalid: give u8[total] and i64[n+1]"
        )
    return np.ascontiguousarray(data), np.ascontiguousarray(offsets, np.int64)


def _as_keys(keys: ArrayLike) -> NDArray[np.float64]:
    array = np.ascontiguousarray(keys, np.float64)
    if array.ndim != 1 or np.isnan(array).any():
        raise ConfigError(f"keys of shape {array.shape} are invalid: give f64[n] without NaN")
    return array


def check_sizes(num_ids: int, capacity_bytes: int, mean_size: float) -> None:
    """Raise :class:`~stoker.errors.ConfigError` unless an arena can be of these sizes."""
    if not 1 <= num_ids <= _MAX_IDS:
        raise ConfigError(f"num_ids={num_ids} is invalid: give 1 to {_MAX_IDS}")
    if not 0 <= capacity_bytes <= _MAX_BYTES:
        raise ConfigError(f"capacity_bytes={capacity_bytes} is invalid: give 0 to {_MAX_BYTES}")
    if not 0 < mean_size <= _MAX_BYTES:
        raise ConfigError(f"mean_size={mean_size} is invalid: give bytes above 0")


def memory_needed(
    num_ids: int, capacity_bytes: int, mean_size: int, limit_bytes: int, *, on_disk: bool = False
) -> int:
    """Return the bytes of memory that an arena takes while so many payload bytes fit."""
    return segment_bytes(
        num_ids, capacity_bytes, mean_size, on_disk, False, min(limit_bytes, capacity_bytes)
    )


def payload_within(size: float, capacity_bytes: int, needed: Callable[[int], int]) -> int:
    """Return how much payload, of a capacity, fits into ``size`` bytes of memory or disk.

    ``needed`` says what is taken while so much fits; 0 where nothing does.
    """
    return max(0, bisect_right(range(capacity_bytes + 1), size, key=needed) - 1)


class ArenaView:
    """An arena in memory of another user's, by a descriptor ``fd`` that is open for reading.

    Nothing of this process can change the memory: accesses are not noted, so that what stays is up
    to the arena's own processes. The descriptor is copied, and the memory stays mapped as long as
    the object lives. Safe in any thread and in forked children. Raises
    :class:`~stoker.errors.SegmentError` for what is no arena in memory of this version.
    """

    def __init__(self, fd: int) -> None:
        self._core = View(os.dup(fd))

    @property
    def num_ids(self) -> int:
        """Number of ids."""
        return self._core.num_ids

    def get_many(
        self, ids: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
        """Return data u8[total], offsets i64[n+1] and found bool[n]; see :meth:`Arena.get_many`."""
        return self._core.get(ids)

    def contains(self, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return bool[n], True where an id is cached now."""
        return self._core.contains(ids)


def _rules(region: Region, budget: int) -> dict[str, Any]:
    rules = asdict(region)
    del rules["share"]
    return rules | {
        "budget": budget,
        "promote_to": region.promote_to or "",
        "ghost": region.ghost or "",
    }


__all__ = ["Arena", "Handle"]
