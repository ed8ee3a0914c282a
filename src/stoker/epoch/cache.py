"""What a user says of a cache: ``Cache("20%", disk="/nvme/train", stage="decoded")``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from stoker.epoch.stage import check_stage
from stoker.errors import ConfigError
from stoker.jobs.member import Sharing
from stoker.pool.pool_address import check_pool
from stoker.store.disk import CacheDir
from stoker.types import parse_bytes

Size = int | float | str
"""Bytes, ``8 << 30`` or ``"8GiB"``, or where that has a meaning a share, ``"20%"``."""

_EVERYTHING = 1 << 60  # stands for a data set that is not known yet, whatever share is asked for


@dataclass(frozen=True)
class Cache:
    """Where samples are kept, how many of them, and in which form. Immutable; safe to share.

    Sizes are payload bytes: bookkeeping is extra. Shares are of the bytes of the visited samples.
    Nothing is opened or reserved here. Raises :class:`~stoker.errors.ConfigError`, which names
    the value, for what makes no sense whatever the data set.
    """

    memory: Size = "20%"
    """Memory, shared by all processes of this machine; 0 switches the cache in memory off."""
    disk: str | os.PathLike[str] | None = None
    """A directory on a local disk, for one data set only, where a second cache lies below the one
    in memory; what is there when the next run begins is not read again."""
    disk_size: Size | None = None
    """Size of the cache on disk; None: all samples, or as it was made. 0: there is none."""
    pool: str | None = field(default=None, repr=False)  # it may have a password
    """Servers that all nodes share, ``"valkey://h1:6379,h2:6379"``, where samples are looked for
    before the source is read; or ``"unix:/run/stoker.sock"``, a cache that the service there shares
    among the users of a group."""
    pool_size: Size | None = None
    """What this data set may take of the pool; None: what the servers have. 0: there is none."""
    stage: str = "encoded"
    """``"encoded"`` bytes; ``"resized:288"`` or ``"resized:288:90"``, JPEG files whose short side
    and quality are these, where originals are larger: a third of the bytes, and less work; or
    ``"decoded"`` arrays: more bytes, least work. Transforms of the data set, which may be random,
    come after each. Shares of a cache of resized ones are shares of the originals' bytes."""
    prefetch: Size = "256MiB"
    """Bytes, on top of the memory, that a process of its own may read ahead for the ranks of this
    machine; no more than 5 % of the cache or a few batches. 0: nothing is read ahead."""
    fetchers: int | str = "auto"
    """Processes that read ahead. ``"auto"``: one, and more while each makes reading faster, up to
    half the cores and 8."""
    stands_aside: bool = True
    """Whether workers read past the cache, and nothing is read ahead, as long as the samples lie in
    this machine's page cache anyway. ``stats.direct`` counts what was read so."""
    locality: bool = True
    """With ranks on several nodes: whether each sample has one node that keeps it, and ranks prefer
    samples of their node, as far as each step of all ranks has the samples that the plan has there.
    False: ranks divide each step as on one node, and nodes keep what they read."""
    sharing: Sharing = field(default_factory=Sharing)
    """How this job and others that share the cache agree on what stays in it."""

    def __post_init__(self) -> None:
        _check_size("cache", self.memory)
        _check_where("disk", self.disk, self.disk_size)
        _check_where("pool", self.pool, self.pool_size)
        if self.disk is not None:
            CacheDir(self.disk)
        if self.pool is not None:
            check_pool(self.pool)
        check_stage(self.stage)
        parse_bytes(self.prefetch, name="prefetch")
        if self.fetchers != "auto" and not _is_count(self.fetchers):
            raise ConfigError(f"fetchers={self.fetchers!r} is invalid: give 1 to 64, or 'auto'")
        for name in ("stands_aside", "locality"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} is invalid: give True or False")
        if not isinstance(self.sharing, Sharing):
            raise ConfigError(f"sharing={self.sharing!r} is invalid: give a stoker.jobs.Sharing")


def as_cache(cache: Cache | Size) -> Cache:
    """Return a Cache, or one of that much memory; raises ConfigError for anything else."""
    return cache if isinstance(cache, Cache) else Cache(cache)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 64


def _check_size(name: str, size: Size) -> int:
    return parse_bytes(size, of=_EVERYTHING, name=name)


def _check_where(name: str, where: object, size: Size | None) -> None:
    """Raise ConfigError for an invalid size, and for a size without the other."""
    if size is not None and _check_size(f"{name}_size", size) and where is None:
        what = "a directory" if name == "disk" else "servers"
        raise ConfigError(f"{name}_size={size!r} needs {what}: give {name} too")
