"""Packs and loads samples of low importance in a process of its own.

What that process is given at its start, and what all ranks see in shared memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.bundles.depot import location_of, private_location
from stoker.bundles.package import stamp_of
from stoker.errors import ConfigError
from stoker.node.descriptors import Handle
from stoker.node.messages import Channel
from stoker.node.supervisor import Supervisor
from stoker.shared import SharedArray, scratch
from stoker.source.base import Source
from stoker.source.remote.backend import Address
from stoker.store.arena import Arena
from stoker.store.tier import Ids
from stoker.types import format_bytes

_LARGEST = 1 << 28
_PACKAGES = 20  # that a cache has room for, if packages suit it
log = logging.getLogger("stoker")

FIELDS = (
    "packages_built",
    "package_reads",
    "package_bytes",
    "packages_lost",
    "repack_reads",
    "rebuild_reads",
)
"""Packages that were built; those read for the cache, and the bytes of their samples; those found
missing, damaged or of another data set; those read to be repacked; samples read from the source
to build packages."""


@dataclass(frozen=True)
class Packaging:
    """Samples of low importance come in packages, each one read (iCache, HPCA'23).

    Raises :class:`~stoker.errors.ConfigError` for a size out of range.
    """

    min_bytes: int = 1 << 20
    """Bytes of samples in a package at least; fewer only where all of low importance have less."""
    url: str | None = None
    """Where packages are kept: a directory for nothing else, or a prefix of an object store, like
    ``s3://bucket/packages``. They stay there, and a job that is started again finds them; one job
    at a time uses the location. None: a temporary directory, which goes with the job."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Options of the object store, as for :class:`~stoker.source.ObjectSource`; may hold secrets,
    and so is not shown."""

    shrinks: bool = False
    """Whether packages are smaller in a small cache: a twentieth of it at most."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= _LARGEST:
            raise ConfigError(f"min_bytes={self.min_bytes} is invalid: give 1 to {_LARGEST} bytes")

    @classmethod
    def of(cls, min_bytes: int | None, url: str | None = None) -> Packaging:
        """Return packages of ``min_bytes``; None: of the usual size, which shrinks."""
        return cls(url=url, shrinks=True) if min_bytes is None else cls(min_bytes, url)

    def fitted(self, capacity: int) -> Packaging:
        """Return these settings for a cache of ``capacity`` bytes; the same unless they shrink."""
        if not self.shrinks:
            return self
        return replace(self, min_bytes=min(self.min_bytes, max(1, capacity // _PACKAGES)))

    def least_region_bytes(self, sizes: NDArray[np.int64]) -> int:
        """Return the bytes that the cache of low importance needs to hold any package.

        ``sizes`` (``i64[N]``) are those of all samples.
        """
        return int(min(self.min_bytes + sizes.max() - 1, sizes.sum()))


class Packager:
    """Runs the packaging process of this job and node for one rank.

    It builds packages of samples of low importance, stores them where ``settings`` says, and
    brings them into ``region`` of ``arena``, one after the other, as those that lie there are
    served: ``served`` (``u32[N]``, shared by the ranks of the job on this node, who thereby share
    the process) holds the stamp of the epoch in which each sample was served last. ``low`` is what
    the array of places says of samples of low importance. ``owner`` tells this node from others
    that keep packages in the same location, ``seed`` draws which samples come together.

    What becomes of a process that dies, hangs, or cannot be started says
    :class:`~stoker.node.supervisor.Supervisor`; packages that are lost or damaged are built
    again, and while none can be stored the workers read the source, with one warning.

    Used by one thread. Raises :class:`~stoker.errors.ConfigError` when ``region`` is too small
    for one package, and for a location that is not for packages. ``region_bytes`` is what the
    region has whenever there are samples of low importance; None: what it has now.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        served: SharedArray,
        settings: Packaging,
        *,
        low: int,
        region: str = "L",
        region_bytes: int | None = None,
        packaged: SharedArray | None = None,
        owner: str = "0",
        seed: int = 0,
    ) -> None:
        _check_region(arena, region, region_bytes, source, settings)
        if not owner.isalnum():
            raise ConfigError(f"owner={owner!r} is invalid: give letters and digits")
        self.packaged = packaged or SharedArray.create(len(source), np.uint8, "stoker-packaged")
        """``u8[N]``: 1 at samples that lie in the cache because a package brought them."""
        self._totals = SharedArray.create(len(FIELDS), np.float64, "stoker-packages")
        self._epoch: tuple[dict[str, Any], SharedArray, SharedArray] | None = None
        self._has_warned = False
        # By the memory itself: jobs that share a cache have marks of their own, ranks have not.
        key = " ".join(f"{os.fstat(fd).st_ino}" for fd in (arena.handle.fds[0], served.fileno()))
        holder = hashlib.sha256(f"{_boot()} {key}".encode()).hexdigest()[:16]
        self._location = (
            private_location(holder)
            if settings.url is None
            else location_of(settings.url, settings.storage_options)
        )
        self._supervisor = Supervisor(
            "packaging",
            "stoker.bundles.packing",
            f"packaging {key}",
            lambda: Job(
                source,
                arena.handle,
                region,
                low,
                served,
                self._location,
                settings.url is None,
                owner,
                settings.min_bytes,
                seed % 2**64,
                holder,
            ),
            self._introduce,
            self._hear,
        )

    def begin_epoch(self, epoch: int, stamp: int, places: SharedArray, missed: Ids) -> None:
        """Say what is of low importance in ``epoch``, whose served samples ``stamp`` marks.

        ``places`` (``u8[N]``) is shared memory, and identical on all ranks; ``missed`` (``u32[m]``)
        are this rank's samples of low importance that were asked for since the last call and not
        cached, whether another was served or the source was read. Stamps grow.
        """
        if places.array.shape != self.packaged.array.shape or places.array.dtype != np.uint8:
            raise ConfigError(
                f"places of shape {places.array.shape}, {places.array.dtype} are invalid: give "
                f"u8[{len(self.packaged.array)}]"
            )
        ids = np.unique(np.asarray(missed, np.uint32))
        message = {"order": "epoch", "epoch": epoch, "stamp": stamp, "missed": len(ids)}
        with self._supervisor.mutex:
            self._epoch = message, places, SharedArray.copy_of(ids, "stoker-missed")
            self._supervisor.tell(*self._order(self._epoch))

    def stats(self) -> dict[str, int]:
        """Return what the process has counted so far, for all ranks of this node.

        ``packages_built``; ``package_reads`` for the cache and ``package_bytes`` of samples that
        they brought; ``packages_lost``, found missing or damaged; ``repack_reads`` of packages for
        new ones; ``rebuild_reads``, samples read from the source to build packages.
        """
        return dict(zip(FIELDS, self._totals.array.astype(np.int64).tolist(), strict=True))

    def close(self) -> None:
        """Disconnect; the process ends when no rank needs it. May be called again."""
        self._supervisor.close()

    def _introduce(self, channel: Channel) -> None:
        channel.send({"order": "join"}, [self.packaged.fileno(), self._totals.fileno()])
        if self._epoch is not None:
            channel.send(*self._order(self._epoch))

    @staticmethod
    def _order(
        epoch: tuple[dict[str, Any], SharedArray, SharedArray],
    ) -> tuple[dict[str, Any], list[int]]:
        message, places, missed = epoch
        return message, [places.fileno(), missed.fileno()]

    def _hear(self, message: dict[str, Any]) -> None:
        if "trouble" in message and not self._has_warned:
            self._has_warned = True
            log.warning("no packages for now, workers read their samples: %s", message["trouble"])


class Flags:
    """``u8[N]`` in the memory of every rank: 1 at what a package brought. Safe in any thread.

    ``own`` is zeroed memory for them, of the only rank.
    """

    def __init__(self, num_samples: int, own: NDArray[np.uint8] | None = None) -> None:
        self._own: NDArray[np.uint8] = scratch(num_samples, np.uint8) if own is None else own
        self._outlets: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def set(self, ids: Ids) -> None:
        """Mark these as brought by a package."""
        self._write(ids, 1)

    def clear(self, ids: Ids) -> None:
        """Unmark these: they have left, or are cached for another reason."""
        self._write(ids, 0)

    @property
    def ids(self) -> Ids:
        """The samples that are flagged, ``u32[n]``."""
        return np.flatnonzero(self._own.view(np.bool_)).astype(np.uint32)

    def join(self, outlet: NDArray[np.uint8]) -> None:
        """Write to ``outlet`` (``u8[N]``) too from now on, and copy its marks."""
        with self._lock:
            # What a predecessor of this process brought is there still.
            np.maximum(self._own, outlet, out=self._own)
            self._outlets.append(outlet)
            for other in self._outlets:
                other[:] = self._own

    def leave(self, outlet: NDArray[np.uint8]) -> None:
        """Stop writing to it."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self, ids: Ids, value: int) -> None:
        with self._lock:
            for array in self._own, *self._outlets:
                core.write(array, ids, value)


class Totals:
    """Sums of :data:`FIELDS`, written to the memory of every rank. Safe in any thread.

    They continue from the largest that a rank brings: a process that is started again has
    forgotten what its predecessor counted, and the ranks have not.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(len(FIELDS))
        self._outlets: list[NDArray[np.float64]] = []
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to the named fields."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[FIELDS.index(name)] += amount
            self._write()

    def join(self, outlet: NDArray[np.float64]) -> None:
        """Write to ``outlet`` (``f64[len(FIELDS)]``) too from now on."""
        with self._lock:
            np.maximum(self._sums, outlet, out=self._sums)
            self._outlets.append(outlet)
            self._write()

    def leave(self, outlet: NDArray[np.float64]) -> None:
        """Stop writing to it."""
        with self._lock:
            self._outlets = [other for other in self._outlets if other is not outlet]

    def _write(self) -> None:
        for outlet in self._outlets:
            outlet[:] = self._sums


@dataclass(frozen=True)
class Job:
    """The samples to pack, and where packages and samples go."""

    source: Source
    arena: Handle
    """The cache, of whose region :attr:`region` packages are for."""
    region: str
    low: int
    """What the ranks write for samples of low importance into the array of places."""
    served: SharedArray
    """``u32[N]``: the stamp of the latest epoch in which a sample was served."""
    location: Path | Address
    """Where packages are kept."""
    is_private: bool
    """The location is a directory that goes with the process."""
    owner: str
    """Tells packages of this job and node from those of others in the same location."""
    min_bytes: int
    seed: int
    holder: str
    """Tells this job on this node from any other, in hexadecimal digits; new in every run."""

    @property
    def group(self) -> str:
        """What the names of this job's packages begin with."""
        return f"{stamp_of(self.source.fingerprint, len(self.source)).hex()[:16]}-{self.owner}"


def _check_region(
    arena: Arena, region: str, region_bytes: int | None, source: Source, settings: Packaging
) -> None:
    regions = arena.stats()["regions"]
    if region not in regions:
        raise ConfigError(
            f"region={region!r} is not a region of the cache, which has {sorted(regions)}"
        )
    sizes: NDArray[np.int64] = source.sizes
    has = int(regions[region]["budget"]) if region_bytes is None else region_bytes
    needed = settings.least_region_bytes(sizes)
    if has < needed:
        raise ConfigError(
            f"region {region!r} has {format_bytes(has)} ({has} bytes), and a package may take "
            f"{needed} bytes: give the cache more, or min_bytes={settings.min_bytes} less"
        )


def _boot() -> str:
    """Return what tells this boot of this machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
