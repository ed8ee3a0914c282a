"""Opens the disk cache of a data set: found as the last run left it, or made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stoker import _core
from stoker.errors import CapacityError, SegmentError
from stoker.policy.base import Region
from stoker.store.arena import Arena
from stoker.store.cache_dir import CacheDir, DiskMeta
from stoker.store.registry import SharedArena, open_arena
from stoker.types import format_bytes

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

    It is made if need be, and shared with this user's other processes. Samples that it holds
    already go to the first of ``regions``. ``keep_free``: bytes of the file system that making it
    must leave free; by default 1 GiB or 5 %, whichever is more.

    Raises :class:`~stoker.errors.StateMismatch` if the directory is another data set's or of
    another size, :class:`~stoker.errors.ConfigError` if it cannot be used,
    :class:`~stoker.errors.CapacityError` if the room is not there, and
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
    return _core.file_bytes(meta.num_ids, meta.capacity_bytes, meta.mean_size)


def _open_file(place: CacheDir, meta: DiskMeta) -> Arena:
    """Open the segment, once those who are about to leave it have done so."""
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
            "free: ask for a smaller disk_cache, or use another disk"
        )
