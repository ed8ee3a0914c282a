"""The disk cache of a data set: planned from ``Cache(disk=, disk_size=)``, found or made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker._core import file_bytes as core_file_bytes
from stoker.errors import CapacityError, ConfigError, SegmentError
from stoker.policy.base import Region
from stoker.store.arena import Arena
from stoker.store.cache_dir import CacheDir, DiskMeta
from stoker.store.registry import SharedArena, open_arena
from stoker.types import format_bytes, parse_bytes

_LEAST_FREE = 1 << 30
_LEAST_FREE_SHARE = 0.05
_PATIENCE = 10.0  # seconds for the processes of a job that just ended to let go of the file


def open_disk(
    place: CacheDir,
    meta: DiskMeta,
    regions: Sequence[Region],
    *,
    keep_free: int | None = None,
    share: bool = True,
) -> SharedArena:
    """Return the arena in the directory ``place``, with what earlier runs left there.

    It is made if necessary, and shared with this user's other processes. Samples that it holds
    already go to the first of ``regions``. ``keep_free``: bytes of the file system that making it
    must leave free; by default 1 GiB or 5 %, whichever is more.

    Raises :class:`~stoker.errors.StateMismatch` if the directory is another data set's or of
    another size, :class:`~stoker.errors.ConfigError` if it cannot be used,
    :class:`~stoker.errors.CapacityError` if there is too little space, and
    :class:`~stoker.errors.SegmentError` if it is in use by a process that does not share it, or
    damaged. Safe in any thread and process.
    """
    place.check(meta)

    def make() -> Arena:
        with place.locked():
            found = place.read()
            agreed = place.check(meta)
            if found is None:
                _check_room(place.path, agreed, keep_free)
                place.describe(agreed)
            return _open_file(place, agreed)

    place.mark()
    return open_arena(
        f"{meta.key}-disk-{place.identity}",
        meta.num_ids,
        meta.capacity_bytes,
        meta.mean_size,
        regions,
        make=make,
        share=share,
        description=f"disk cache in {place.path}",
    )


def file_bytes(meta: DiskMeta) -> int:
    """Return the bytes that a disk cache takes on disk."""
    return core_file_bytes(meta.num_ids, meta.capacity_bytes, meta.mean_size)


def _open_file(place: CacheDir, meta: DiskMeta) -> Arena:
    """Open the segment, once processes that are leaving it have done so."""
    place.await_unused(_PATIENCE)
    with place.open_segment() as path:
        try:
            return Arena(meta.num_ids, meta.capacity_bytes, meta.mean_size, path)
        except SegmentError as error:
            called = str(error).replace(str(path), str(place.segment))
            raise SegmentError(called) from error


def _check_room(path: Path, meta: DiskMeta, keep_free: int | None) -> None:
    disk = os.statvfs(path)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    floor = max(_LEAST_FREE, int(total * _LEAST_FREE_SHARE)) if keep_free is None else keep_free
    needed = file_bytes(meta)
    if free - needed < floor:
        raise CapacityError(
            f"a disk cache of {format_bytes(meta.capacity_bytes)} takes {format_bytes(needed)} of "
            f"{path}, where {format_bytes(free)} are free and {format_bytes(floor)} are to stay "
            "free: ask for a smaller disk_size, or use another disk"
        )


@dataclass(frozen=True)
class Wanted:
    """What there is to cache."""

    key: str
    num_ids: int
    data_bytes: int
    """Of all samples that are visited."""
    everything: int
    """Bytes that hold all of them with certainty; more where sizes are estimates."""
    largest: int
    mean_size: float
    local_identity: str
    """Tells the files from others with the same key; see :mod:`stoker.source.base`."""


class DiskPlan:
    """A disk cache, checked, not opened yet."""

    def __init__(self, place: CacheDir, meta: DiskMeta, keeps_all: bool) -> None:
        self._place = place
        self._meta = meta
        self.keeps_all = keeps_all
        """Whether all samples fit."""

    def announce(self, check: Callable[[str, int], None]) -> None:
        """Tell ``check`` the directory and the bytes of disk it takes; raises what that raises."""
        check(str(self._place.path), file_bytes(self._meta))

    def open(self, regions: Sequence[Region], *, keep_free: int | None = None) -> SharedArena:
        """Return the disk cache; arguments and errors are those of :func:`open_disk`."""
        return open_disk(self._place, self._meta, regions, keep_free=keep_free)


def plan_disk(
    disk: str | os.PathLike[str] | None,
    disk_size: int | float | str | None,
    wanted: Wanted,
    *,
    is_private: bool = False,
    name: str = "disk_size",
) -> DiskPlan | None:
    """Return the disk cache as the user asked for it, or None for none.

    Without ``disk_size`` it has the size of the cache in ``disk``, or holds all samples.
    ``is_private``: the key means nothing to the next run. ``name``: what the user calls the size.

    Raises :class:`~stoker.errors.ConfigError` for invalid sizes or a directory that cannot
    be used, and :class:`~stoker.errors.StateMismatch` for another data set's, or another size.
    """
    if disk is None:
        return None
    asked = wanted.everything
    if disk_size is not None:
        asked = parse_bytes(disk_size, of=wanted.data_bytes, name=name)
    if asked == 0:
        return None
    if asked < wanted.largest:
        raise ConfigError(
            f"{name}={disk_size!r} is {asked} bytes and the largest sample has "
            f"{wanted.largest}: give it more, or leave it out"
        )
    if is_private:
        raise ConfigError(
            f"disk={str(disk)!r} is invalid, as nothing tells the next run that this is "
            "the same data set: give wrap() a name, or the decoder one"
        )
    place = CacheDir(disk)
    found = place.read()
    capacity = min(asked, wanted.everything)
    if disk_size is None and found is not None:
        capacity = found.capacity_bytes
    meta = DiskMeta(
        wanted.key,
        wanted.num_ids,
        capacity,
        max(1, round(wanted.mean_size)),
        local_identity=wanted.local_identity,
    )
    return DiskPlan(place, place.check(meta), capacity >= wanted.everything)
