"""Memory over disk: what memory evicts goes down, what is wanted comes up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SegmentError
from stoker.shared import SharedArray
from stoker.source.packed import Buffer, Packed, gather, pack, pick
from stoker.store.arena import Arena
from stoker.store.counters import Counters
from stoker.store.memory_tier import MemoryTier
from stoker.store.tier import GuardedTier, Ids, Into, Keys, Mask

FIELDS = ("disk_hits", "disk_bytes", "disk_errors")
"""What is counted, over all processes that have the tier: samples and bytes that came from disk,
and failures of the disk."""


class StackedTier:
    """Keeps samples in ``memory`` and below it, on ``disk``, an arena over a file.

    A disk that does not hold everything complements memory: new samples go to memory, evicted and
    rejected ones to disk; a sample that is read from disk and admitted to memory leaves the
    disk. With ``keeps_all`` the disk has room for the whole data set, unless it is limited:
    everything is written to it at once and stays there, so that the next run finds it.

    Claims are in the disk's arena, which decides about samples that memory rejected.
    Its locks and claims are in memory: a failing disk costs reads of the source, a
    warning per process, and counts in :meth:`stats`, nothing else. Owns both tiers. Safe in any
    thread; pickled to another process it shares memory, disk and counters.
    """

    _disk: GuardedTier
    _errors: int

    def __init__(
        self,
        memory: MemoryTier,
        disk: MemoryTier,
        *,
        keeps_all: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.memory = memory
        self.disk = disk
        self._may_keep_all = keeps_all
        self.counters = counters or Counters(FIELDS)
        self._guard()

    @property
    def keeps_all(self) -> bool:
        """Whether the disk has room for all samples, as long as it is not lent to others."""
        disk = self.disk.arena
        return self._may_keep_all and disk.limit_bytes == disk.capacity_bytes

    @property
    def arena(self) -> Arena:
        """The arena in memory."""
        return self.memory.arena

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The arenas that hold samples, the fastest first."""
        return (self.memory.arena, self.disk.arena)

    @property
    def regions(self) -> tuple[str, ...]:
        """Names that places are indices into."""
        return self.memory.regions

    def attached(self) -> StackedTier:
        """Return another membership of the same arenas, with leases and claims of its own."""
        memory = self.memory.attached()
        try:
            disk = self.disk.attached()
        except BaseException:
            memory.close()
            raise
        return StackedTier(memory, disk, keeps_all=self._may_keep_all, counters=self.counters)

    # --- samples ---

    def get_many(self, ids: Ids, keys: Keys = None, into: Into = None) -> tuple[Packed, Mask]:
        """Return the cached samples and which were found; what was on disk comes up."""
        held, found = self.memory.get_many(ids, keys, into)
        if found.all():
            return held, found
        missing = np.flatnonzero(~found)
        below, there = self._read(ids[missing], None if keys is None else keys[missing])
        if not there.any():
            return held, found
        part, index = np.zeros(len(ids), np.int64), np.arange(len(ids))
        part[missing[there]], index[missing[there]] = 1, np.flatnonzero(there)
        found[missing] = there
        return gather([held, below], part, index), found

    def rise(self, ids: Ids, keys: Keys = None, overflow: str = "") -> Mask:
        """Bring samples ``ids`` up from the disk, and return which were there.

        Samples that memory's entrance rejects go to its region ``overflow``, and stay on disk.
        """
        return self._read(ids, keys, overflow)[1]

    def put_many(
        self, ids: Ids, samples: Packed | list[Buffer], keys: Keys = None, overflow: str = ""
    ) -> Mask:
        """Offer samples, packed or each in its buffer, and return which are cached now.

        It ends the caller's claims on those. ``overflow``: the region of memory for samples that
        its entrance rejects; they go to disk too.
        """
        if not isinstance(samples, Packed):
            samples = Packed(*pack(samples))
        if self.keeps_all:
            admitted = self.memory.put_many(ids, samples, keys, overflow)
            return admitted | self._write(ids, samples, keys)
        admitted, victims, left, left_keys = self._exchange(ids, samples, keys)
        self._disk.abandon(ids[admitted])
        refused = np.flatnonzero(~admitted)
        if refused.size:
            rest, rest_keys = pick(samples, refused), None if keys is None else keys[refused]
            if overflow:
                admitted[refused] = self._put_aside(ids[refused], rest, overflow)
            admitted[refused] |= self._write(ids[refused], rest, rest_keys)
        self._write(victims, left, left_keys)
        return admitted

    def discard(self, ids: Ids) -> None:
        """Forget samples."""
        self.memory.discard(ids)
        self._disk.discard(ids)

    def drop_from(self, region: str, ids: Ids) -> None:
        """Drop samples in a region of memory; see :meth:`MemoryTier.drop_from`."""
        self.memory.drop_from(region, ids)

    def place_by(self, places: SharedArray) -> None:
        """Put each new sample where ``places`` says, ``u8[N]`` by id, in memory and on disk."""
        self.memory.place_by(places)
        self.disk.place_by(places)

    def set_keys(self, ids: Ids, keys: NDArray[np.float64]) -> None:
        """Give cached samples new keys, in memory and on disk."""
        self.memory.set_keys(ids, keys)
        self._disk.set_keys(ids, keys)

    def move(self, ids: Ids, region: str, keys: Keys = None) -> Mask:
        """Move samples to another region of memory; what leaves for them is forgotten."""
        return self.memory.move(ids, region, keys)

    def list(self, region: str) -> Ids:
        """Return the ids in a region of memory, ascending."""
        return self.memory.list(region)

    def copies(self, ids: Ids, region: str) -> Ids:
        """Return which copy of each of ``ids`` lies in a region of memory, 0 for none."""
        return self.memory.copies(ids, region)

    def resize(self, shares: Mapping[str, float]) -> None:
        """Redivide the budgets, in memory and on disk; what memory evicts is forgotten."""
        self.memory.resize(shares)
        self._disk.resize(shares)

    # --- single flight ---

    def claim(self, ids: Ids) -> Mask:
        """Claim missing samples, and return which the caller got."""
        own = self._disk.claim(ids)
        try:
            # Looked at with the claim held: what others had under way is above by now.
            held = own & self.memory.arena.contains(ids)
        except BaseException:
            self._disk.abandon(ids[own])
            raise
        if held.any():
            self._disk.abandon(ids[held])
        return own & ~held

    def abandon(self, ids: Ids) -> None:
        """Give back claims."""
        self._disk.abandon(ids)

    def wait(self, ids: Ids, timeout: float) -> Mask:
        """Wait for other claimants, ``timeout`` seconds at most; return which are cached."""
        found = self.memory.arena.contains(ids)
        if not found.all():
            rest = np.flatnonzero(~found)
            found[rest] = self._disk.wait(ids[rest], timeout)
            rest = rest[~found[rest]]
            found[rest] = self.memory.arena.contains(ids[rest])
        return found

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        """Return memory's counters, sums over both, and each under ``memory`` and ``disk``.

        Summed are ``capacity_bytes``, ``payload_bytes``, ``entries`` and ``overhead_bytes``.
        ``disk_hits``, ``disk_bytes`` and ``disk_errors`` are of this job's processes only.
        """
        memory, disk = self.memory.stats(), self._disk.stats()
        summed = ("capacity_bytes", "payload_bytes", "entries", "overhead_bytes")
        own = {name: int(value) for name, value in self.counters.totals().items()}
        both = {name: memory[name] + disk.get(name, 0) for name in summed}
        return {**memory, **both, **own, "memory": memory, "disk": disk}

    def close(self) -> None:
        """Release both arenas."""
        try:
            self.memory.close()
        finally:
            self._disk.close()

    # --- inside ---

    def _read(self, ids: Ids, keys: Keys, overflow: str = "") -> tuple[Packed, Mask]:
        """Return what the disk has of ``ids``, and take it up."""
        below, there = self._disk.get_many(ids, keys)
        if not there.all():
            self._look_for_errors()
        if not there.any():
            return below, there
        up = np.flatnonzero(there)
        samples = below if there.all() else pick(below, up)
        self.counters.add(disk_hits=len(up), disk_bytes=int(samples.offsets[-1]))
        self._take_up(ids[up], samples, None if keys is None else keys[up], overflow)
        return below, there

    def _take_up(self, ids: Ids, samples: Packed, keys: Keys, overflow: str) -> None:
        if self.keeps_all:
            self.memory.put_many(ids, samples, keys, overflow)
            return
        admitted, victims, left, left_keys = self._exchange(ids, samples, keys)
        if admitted.any():
            self._disk.discard(ids[admitted])  # makes the room that its victims need
        if overflow and not admitted.all():
            refused = np.flatnonzero(~admitted)
            self._put_aside(ids[refused], pick(samples, refused), overflow)
        self._write(victims, left, left_keys)

    def _exchange(self, ids: Ids, samples: Packed, keys: Keys) -> tuple[Mask, Ids, Packed, Keys]:
        """Offer samples to memory; return which it took, and its victims with their keys."""
        admitted = np.zeros(len(ids), np.bool_)
        left: list[tuple[Ids, Packed, NDArray[np.float64]]] = []
        for region, chosen in self.memory.targets(ids):
            part, some = pick(samples, chosen), None if keys is None else keys[chosen]
            admitted[chosen], victims, data, offsets, left_keys = self.memory.arena.exchange_many(
                ids[chosen], part.data, part.offsets, some, region, self.memory.overflow
            )
            left.append((victims, Packed(data, offsets), left_keys))
        if len(left) == 1:
            return admitted, *left[0]
        number = np.repeat(np.arange(len(left)), [len(victims) for victims, _, _ in left])
        index = np.concatenate([np.arange(len(victims)) for victims, _, _ in left])
        packed = gather([packed for _, packed, _ in left], number, index)
        return (
            admitted,
            np.concatenate([victims for victims, _, _ in left]),
            packed,
            np.concatenate([left_keys for _, _, left_keys in left]),
        )

    def _put_aside(self, ids: Ids, samples: Packed, region: str) -> Mask:
        return self.memory.arena.put_many(ids, tuple(samples), None, region)

    def _write(self, ids: Ids, samples: Packed, keys: Keys) -> Mask:
        """Offer samples to the disk."""
        if not ids.size:
            return np.zeros(0, np.bool_)
        kept = self._disk.put_many(ids, samples, keys)
        if not kept.all():
            self._look_for_errors()
        return kept

    def _look_for_errors(self) -> None:
        """Count and report failures of the disk since the last call; they show only as misses."""
        try:
            errors = self.disk.arena.io_errors
        except SegmentError:
            return  # closed, which its caller was told
        if errors > self._errors:
            self._errors = errors
            self._disk.complain(SegmentError("it does not read or write; see the system's log"))

    def _guard(self) -> None:
        self._errors = self.disk.arena.io_errors
        self._disk = GuardedTier(
            self.disk,
            lambda: self.counters.add(disk_errors=1),
            "the disk cache fails, and the cache in memory continues without it",
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_disk"], state["_errors"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard()
