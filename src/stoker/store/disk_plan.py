"""From ``cache_dir=`` and ``disk_cache="50%"`` to the disk cache of a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker.policy.base import Region
from stoker.store.cache_dir import CacheDir, DiskMeta
from stoker.store.disk import file_bytes, open_disk
from stoker.store.registry import SharedArena
from stoker.types import parse_bytes


@dataclass(frozen=True)
class Wanted:
    """What there is to cache."""

    key: str
    num_ids: int
    data_bytes: int
    """Of all samples that are visited."""
    everything: int
    """Bytes that surely hold all of them; more where sizes are estimates."""
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
    cache_dir: str | os.PathLike[str] | None,
    disk_cache: int | float | str | None,
    wanted: Wanted,
    *,
    is_private: bool = False,
    name: str = "disk_cache",
) -> DiskPlan | None:
    """Return the disk cache as the user asked for it, or None for none.

    Without ``disk_cache`` it is as large as what ``cache_dir`` has, or holds all samples.
    ``is_private``: the key says nothing to the next run. ``name``: what the user calls the size.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense or a directory that cannot
    be used, and :class:`~stoker.errors.StateMismatch` for another data set's, or another size.
    """
    asked = wanted.everything
    if disk_cache is not None:
        asked = parse_bytes(disk_cache, of=wanted.data_bytes, name=name)
    if cache_dir is None:
        if disk_cache is not None and asked:
            raise ConfigError(f"disk_cache={disk_cache!r} needs a place: give cache_dir too")
        return None
    if asked == 0:
        return None
    if asked < wanted.largest:
        raise ConfigError(
            f"{name}={disk_cache!r} is {asked} bytes and the largest sample has "
            f"{wanted.largest}: give it more, or leave it out"
        )
    if is_private:
        raise ConfigError(
            f"cache_dir={str(cache_dir)!r} is refused, as nothing tells the next run that this is "
            "the same data set: give wrap() a name, or the decoder one"
        )
    place = CacheDir(cache_dir)
    found = place.read()
    capacity = min(asked, wanted.everything)
    if disk_cache is None and found is not None:
        capacity = found.capacity_bytes
    meta = DiskMeta(
        wanted.key,
        wanted.num_ids,
        capacity,
        max(1, round(wanted.mean_size)),
        local_identity=wanted.local_identity,
    )
    return DiskPlan(place, place.check(meta), capacity >= wanted.everything)
