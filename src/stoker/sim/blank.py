"""Samples that have lengths and no bytes: their arena, their source and their packages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from stoker._core import Arena as Core
from stoker._core import segment_bytes
from stoker.bundles import Packaging
from stoker.bundles.builder import Builder, numbers_in
from stoker.bundles.depot import Pieces
from stoker.bundles.package import Package
from stoker.bundles.packager import FIELDS, Flags, Job, Totals
from stoker.bundles.workshop import Epoch, Loaded, Workshop
from stoker.errors import CapacityError, ConfigError
from stoker.node.memory import read_memory
from stoker.scores import Scores
from stoker.shared import SharedArray, in_parts, scratch
from stoker.source.base import BaseSource, PackedRead, Source, check_ids
from stoker.source.packed import Offsets, Packed, unpack
from stoker.store.arena import Arena, Samples
from stoker.store.tier import Ids, Keys, Mask
from stoker.types import format_bytes

_STUCK = (Loaded.NO_ROOM, Loaded.TOO_LARGE)
_GOES_ON = (Loaded.DONE, Loaded.NOT_NEEDED, Loaded.LOST)


class AccountingArena(Arena):
    """An :class:`~stoker.store.arena.Arena` that counts the bytes of samples and has none of them.

    ``lengths`` (``i64[N]``): bytes of each sample, whatever is put; what is read is empty. Of an
    array that repeats one element (``np.broadcast_to``) it keeps that one. Orders,
    admission, regions and budgets are those of any arena, since it is the same code; eviction is
    exact. About 40 bytes of memory a sample. It is used by one thread at a time. Raises
    :class:`~stoker.errors.ConfigError` for lengths below 0 and
    :class:`~stoker.errors.CapacityError` when the memory is not there.
    """

    def __init__(self, lengths: NDArray[np.int64], capacity_bytes: int, *, seed: int = 0) -> None:
        if not len(lengths) or int(lengths.min()) < 0 or capacity_bytes < 0:
            raise ConfigError(
                f"capacity_bytes={capacity_bytes} and {len(lengths)} lengths are invalid: give "
                "0 bytes or more, for one sample at least"
            )
        is_one = lengths.strides == (0,)
        self._lengths = np.ascontiguousarray(lengths[:1] if is_one else lengths, np.int64)
        mean = max(1, round(float(lengths.mean())))
        needed = segment_bytes(len(lengths), capacity_bytes, mean, False, True)
        available = read_memory().available
        if needed > available:
            raise CapacityError(
                f"accounting for {len(lengths)} samples takes {format_bytes(needed)} of memory, "
                f"and {format_bytes(available)} are free here: replay fewer samples"
            )
        self._core = Core.create(len(lengths), capacity_bytes, mean, "", True, seed, True)

    def put_many(
        self,
        ids: ArrayLike,
        samples: Samples = (),
        keys: ArrayLike | None = None,
        region: str = "main",
        overflow: str = "",
    ) -> NDArray[np.bool_]:
        """Offer samples ``u32[n]`` of their known lengths; see :meth:`Arena.put_many`."""
        order = None if keys is None else np.ascontiguousarray(keys, np.float64)
        return self._core.put_lengths(self._ids(ids), self._lengths, order, region, overflow)

    def replay(
        self,
        ids: Ids,
        keys: Keys = None,
        *,
        after: Keys = None,
        regions: NDArray[np.uint8] | None = None,
        entrance: str = "main",
        overflow: str = "",
        at_once: int = 1,
    ) -> Mask:
        """Make accesses ``u32[n]``, ``at_once`` in a batch; return ``bool[n]``, which ones hit.

        Of each batch, all samples are got, those found are given their ``keys`` (``f64[n]``), and
        those missed are put with theirs. With ``after`` (``f64[n]``), ``keys`` are for puts only,
        and the samples of a batch have these keys when it is over. Of several misses of a sample in
        one batch the first counts, the others hit. ``regions`` (``u8[n]``, as indices): where each
        goes if it is put; else to ``entrance``; what is not admitted goes to ``overflow``.

        The same as :meth:`get_many`, :meth:`set_keys`, :meth:`claim` and :meth:`put_many`, batch
        after batch, at ten times the speed. Raises :class:`~stoker.errors.ConfigError` for ids and
        regions out of range, and for lengths that differ.
        """
        return self._core.replay(
            self._ids(ids), self._lengths, keys, after, regions, entrance, overflow, at_once
        )

    def replay_once_each(
        self,
        ids: Ids,
        swaps: Swaps,
        search: Callable[[int], Ids],
        bring: Callable[[Ids], int] | None,
        *,
        keys: Keys = None,
        after: Keys = None,
        entrance: str,
        overflow: str,
        at_once: int,
    ) -> tuple[Ids, NDArray[np.int8]]:
        """Make accesses ``u32[n]`` as :meth:`replay` does, where samples stand in for others.

        Each is served once an epoch, as by :class:`~stoker.store.substitutes.OnceEach`. Return who
        was served, ``u32[n]``, and how, ``i8[n]``, :class:`~stoker.types.Outcome`. The same as a
        :class:`~stoker.store.store.Store` does batch after batch. ``keys`` and ``after`` (both
        ``f64[n]``, or neither): of what is asked for, before its batch and after it. Raises
        :class:`~stoker.errors.ConfigError` where what stands in for others needs keys.

        ``search`` returns who seems to be free, none where there are no more, and is told how many
        accesses have begun. ``bring`` brings packages: it is told who was served by the cache of
        those that take part, as soon as they have ``swaps.room`` bytes, and returns the next room.
        """
        served, outcomes, swaps.room, swaps.gone, left = self._core.replay_once_each(
            self._ids(ids),
            self._lengths,
            keys,
            after,
            entrance,
            overflow,
            at_once,
            swaps.served,
            swaps.turns,
            swaps.stamp,
            swaps.places,
            swaps.place,
            swaps.candidates,
            search,
            swaps.packaged,
            swaps.room,
            swaps.gone,
            bring,
        )
        swaps.candidates = swaps.candidates[len(swaps.candidates) - left :]
        return served, outcomes

    def replay_batch(
        self,
        ids: Ids,
        keys: Keys | Scores,
        stand_ins: NDArray[np.uint64],
        key_region: str,
        *,
        regions: NDArray[np.uint8] | None = None,
        entrance: str = "main",
        overflow: str = "",
    ) -> tuple[Ids, Mask]:
        """Make a batch of accesses ``u32[n]``; return what each got, ``u32[n]``, and which hit.

        As :meth:`replay`, but that key samples in ``key_region`` are got in place of those missed
        that they stand for: ``stand_ins`` is the table ``serves`` of
        :class:`~stoker.store.substitutes.StandIns`, and this the same as what
        :class:`~stoker.store.substitutes.ByNeighbour` chooses by it. ``keys`` (``f64[n]``) are
        those of samples that are put, or the scores that say them, -inf for one never seen; nothing
        else gets a new one.
        """
        scores = keys if isinstance(keys, Scores) else None
        return self._core.replay_batch(
            self._ids(ids),
            self._lengths,
            None if isinstance(keys, Scores) else keys,
            None if scores is None else scores.values,
            None if scores is None else scores.seen,
            regions,
            entrance,
            overflow,
            stand_ins,
            key_region,
        )


@dataclass
class Swaps:
    """What decides who is served for whom in the runs of an epoch, each sample once.

    See :class:`~stoker.store.substitutes.OnceEach`. Arrays are by sample; runs write to them.
    """

    served: NDArray[np.uint32]
    turns: NDArray[np.uint32]
    """``u32[N]``, on whose turn each was served."""
    stamp: int
    places: NDArray[np.uint8] | None
    """``u8[N]``, the region of each sample; None: all are put to the entrance and take part."""
    place: int
    """The region of those that take part."""
    candidates: Ids = field(default_factory=lambda: np.empty(0, np.uint32))
    """Who was found to be free last, as far as not used yet."""
    packaged: NDArray[np.uint8] | None = None
    """``u8[N]``: 1 at what came with a package."""
    room: int = 0
    """Bytes of those that take part, to be served before the next package may have room."""
    gone: Ids = field(default_factory=lambda: np.empty(0, np.uint32))
    """Those that the cache has served since packages were brought last."""


class BlankSource(BaseSource):
    """Samples ``sizes`` (``i64[N]``) bytes long, and empty when they are read. Thread-safe.

    For an :class:`AccountingArena`, which knows how long they are.

    Raises :class:`~stoker.errors.ConfigError` for ids out of range.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes = sizes.view()
        self._sizes.flags.writeable = False

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> Offsets:
        """Bytes of each sample, i64[N], read-only."""
        return self._sizes

    @property
    def sizes_are_exact(self) -> bool:
        """Whether samples are as long as they are said to be: none of these is."""
        return False

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the lengths."""
        digest = hashlib.blake2b(digest_size=16)
        for part in in_parts(len(self)):
            digest.update(np.ascontiguousarray(self._sizes[part]).data)
        return digest.hexdigest()

    def read(self, ids: npt.ArrayLike) -> list[bytes]:
        """Return nothing for each of ``ids``."""
        data, offsets, _ = self.read_packed(ids)
        return unpack(data, offsets)

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        """Return samples of no bytes; there are never errors."""
        count = len(check_ids(ids, len(self)))
        return np.empty(0, np.uint8), np.zeros(count + 1, np.int64), {}


def no_bytes(count: int) -> Packed:
    """Return so many samples of no bytes."""
    return Packed(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))


class BlankDepot:
    """Packages without bytes; see :class:`~stoker.bundles.depot.Depot`."""

    def names(self) -> list[str]:
        """Return no packages: none is of an earlier run."""
        return []

    def publish(self, name: str, pieces: Pieces) -> None:
        """Keep nothing."""

    def read(self, name: str, num_bytes: int = -1) -> memoryview:
        """Raise FileNotFoundError: :class:`BlankBuilder` knows what is in a package."""
        raise FileNotFoundError(name)

    def remove(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class BlankBuilder(Builder):
    """Builds packages of samples that have no bytes: all that it does to get them is counted."""

    def read(self, number: int) -> Package:
        """Return a package of the catalogue."""
        ids = self._catalogue.ids(number)
        return Package(ids, no_bytes(len(ids)))

    def _gather(self, ids: Ids, home: NDArray[np.uint32]) -> Package:
        _, _, found = self._arena.get_many(ids)
        lacking = home[~found]
        for number in numbers_in(lacking):
            self._opened(number)
        self._totals.add(rebuild_reads=int(np.count_nonzero(lacking == 0)))
        # A copy: these are part of an array of the whole epoch's, which would stay as long.
        return Package(ids.copy(), no_bytes(len(ids)))

    def _publish(self, package: Package) -> str:
        return ""


class Packages:
    """Packs and loads without delay: an upper bound of what the packaging process achieves.

    Arguments are those of :class:`~stoker.bundles.Packager`. Used by one thread.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        served: SharedArray,
        packaged: SharedArray,
        settings: Packaging,
        *,
        low: int,
        region: str,
        seed: int,
    ) -> None:
        self._low = low
        self._totals = np.zeros(len(FIELDS))
        flags, totals = Flags(len(source), packaged.array), Totals()
        totals.join(self._totals)
        job = Job(
            source,
            arena.handle,
            region,
            low,
            served,
            Path(),  # nothing is written: packages are in memory
            True,
            "0",
            settings.min_bytes,
            seed,
            "0",
        )
        self._workshop = Workshop(
            job, arena, BlankDepot(), flags, totals, is_told=True, builder=BlankBuilder
        )
        self._sizes = source.sizes
        self._low_ones = np.zeros(0, np.bool_)  # of the epoch, once it has begun
        self._missed: Mask = scratch(len(source), np.bool_)
        self._lacking = 0

    def begin_epoch(self, epoch: int, stamp: int, places: NDArray[np.uint8]) -> None:
        """Repack for ``epoch``, from which on ``stamp`` marks what is served."""
        low, missed = scratch(len(places), np.bool_), self._missed
        np.equal(places, self._low, out=low)
        missed &= low
        self._low_ones, self._missed = low, scratch(len(places), np.bool_)
        self._workshop.begin(Epoch(epoch, stamp, low), missed)
        self.work()

    def note_missed(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that were asked for and not cached."""
        self._missed[ids] = True

    def note_served(self, ids: NDArray[np.uint32]) -> None:
        """Note samples ``u32[n]`` that the cache served; if that may make room, build and load."""
        self.note_low(ids[self._low_ones[ids]])

    def note_low(self, ids: NDArray[np.uint32]) -> None:
        """Do so for samples of low importance."""
        self._workshop.note_served(ids)
        self._lacking -= int(self._sizes[ids].sum())
        if self._lacking <= 0:
            self.work()

    @property
    def lacking(self) -> int:
        """Bytes of low importance that are to be served before :meth:`work` has anything to do."""
        return self._lacking

    def work(self) -> None:
        """Build and load as long as there is room for a package."""
        built, loaded = True, None
        while built or loaded in _GOES_ON:
            built = self._workshop.build()
            if loaded not in _STUCK:  # more packages make no room
                loaded = self._workshop.load()
        self._lacking = self._workshop.lacking if loaded is Loaded.NO_ROOM else 0

    def stats(self) -> dict[str, int]:
        """Return the counts of :meth:`stoker.bundles.Packager.stats`."""
        return dict(zip(FIELDS, self._totals.astype(np.int64).tolist(), strict=True))
