"""Memory that unrelated processes share by name: one arena per data set and user, and arrays."""

from __future__ import annotations

import math
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from stoker._core import ABI
from stoker.errors import SegmentError, UntrustedPath
from stoker.node import descriptors, rendezvous
from stoker.node.descriptors import Handle
from stoker.node.rendezvous import Announcement, Participant, RendezvousFiles, join_or_create
from stoker.node.runtime_dir import existing_runtime_dir
from stoker.policy.base import Region
from stoker.shared import SharedArray
from stoker.store.arena import Arena
from stoker.types import format_bytes

ARENA = "arena"
"""What a holder announces as its kind."""
Layout = Mapping[str, tuple[int, DTypeLike]]
"""Name of an array -> its length and the type of its elements."""


class SharedArena:
    """An open arena, and this process's part in keeping it findable for others.

    Also a context manager. Forked children may continue to use :attr:`arena`; they keep it alive
    but not findable. Closed at the end of the process at the latest.
    """

    def __init__(self, arena: Arena, *, created: bool, participant: Participant | None) -> None:
        self.arena = arena
        self.created = created
        """True if this call made the arena, False if it was there."""
        self.shared = participant is not None
        """False if other processes cannot find it by its key."""
        # Runs when the object is collected or the interpreter ends, if not before.
        self._finish = weakref.finalize(self, _finish, arena, participant)

    def close(self) -> None:
        """Close the arena, and let other processes know; may be called again."""
        self._finish()

    def __enter__(self) -> SharedArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _finish(arena: Arena, participant: Participant | None) -> None:
    try:
        if participant is not None:
            participant.close()
    finally:
        arena.close()


@dataclass(frozen=True)
class ArenaInfo:
    """What is known of a live arena."""

    key: str
    description: str
    """Its creator's description, for example the data set's root."""
    capacity_bytes: int
    stats: dict[str, Any]
    """The arena's counters, empty if they were unavailable."""
    pid: int
    """The process that answers for it; 0 if that lives in another process namespace."""


def open_arena(
    key: str,
    num_ids: int,
    capacity_bytes: int,
    mean_size: float,
    regions: Sequence[Region],
    *,
    make: Callable[[], Arena] | None = None,
    share: bool = True,
    description: str = "",
    limit_bytes: int | None = None,
) -> SharedArena:
    """Return the arena that this user's processes share under ``key``, made if need be.

    ``key`` stands for the data set's content and the cache stage; together with ``num_ids`` and
    the segment's ABI it makes the arena's identity. The other arguments apply if it is
    new; ``make`` then makes one that is not in memory. An existing arena is used as it is, with a
    warning if it has another size or other regions. If sharing fails (no runtime directory, a
    holder that does not answer) there is a warning and a private arena, as with
    ``share=False``.

    Safe in any thread and process. Raises :class:`~stoker.errors.CapacityError` when the memory
    is not there, :class:`~stoker.errors.ConfigError` for arguments the arena rejects, and
    :class:`~stoker.errors.UntrustedPath` for a runtime directory that other users may change.
    """

    def make_configured() -> Arena:
        arena = (
            Arena(num_ids, capacity_bytes, mean_size, limit_bytes=limit_bytes)
            if make is None
            else make()
        )
        try:
            arena.configure(list(regions))
        except BaseException:
            arena.close()
            raise
        return arena

    wanted = Announcement(
        key=key,
        token=secrets.token_hex(16),
        description=description,
        capacity_bytes=capacity_bytes,
        regions=[asdict(region) for region in regions],
        meta={},
        stats={},
        kind=ARENA,
    )
    if share and sys.platform == "linux":
        try:
            # Processes that could not use the arena (number of ids, layout) do not find it.
            joined = join_or_create(
                wanted, rendezvous_key(key, num_ids), make_configured, Arena.attach
            )
            if joined.said is not None:
                _warn_of_differences(joined.said, wanted)
            return SharedArena(
                joined.held, created=joined.said is None, participant=joined.participant
            )
        except UntrustedPath:
            raise  # each rank would reserve a cache of its own
        except OSError as error:
            message = f"other processes cannot share this cache: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return SharedArena(make_configured(), created=True, participant=None)


def rendezvous_key(key: str, num_ids: int) -> str:
    """Return what processes that share an arena meet by."""
    return f"{key} {num_ids} {ABI}"


def list_arenas() -> list[ArenaInfo]:
    """Return this user's live arenas that answer, sorted by key."""
    folder = existing_runtime_dir()
    found = []
    for files in RendezvousFiles.all(folder) if folder else []:
        try:
            said, fds, pid = rendezvous.inquire(files.socket)
        except OSError:
            continue
        for fd in fds:
            descriptors.drop(fd)
        if said.kind != ARENA:
            continue
        found.append(ArenaInfo(said.key, said.description, said.capacity_bytes, said.stats, pid))
    return sorted(found, key=lambda info: info.key)


def clean() -> int:
    """Remove what dead processes left in the runtime directory; return how many arenas' files.

    Touches only sockets and lock files, and nothing in a directory without Stoker's marker.
    Memory needs no cleaning: it was freed with the last process that held it.
    """
    folder = existing_runtime_dir()
    return sum(files.clean() for files in RendezvousFiles.all(folder)) if folder else 0


def _warn_of_differences(said: Announcement, wanted: Announcement) -> None:
    differences = []
    if said.capacity_bytes != wanted.capacity_bytes:
        sizes = format_bytes(said.capacity_bytes), format_bytes(wanted.capacity_bytes)
        differences.append(f"it has {sizes[0]}, not the {sizes[1]} asked for here")
    if said.regions != wanted.regions:
        differences.append("it keeps samples by another job's policy")
    if differences:
        message = f"a running job's cache of this data set is used: {'; '.join(differences)}"
        warnings.warn(message, RuntimeWarning, stacklevel=5)


class SharedArrays:
    """Arrays by name, and this process's part in keeping them findable. Also a context manager.

    Users of the arrays may continue with them after :meth:`close`: that ends only the part of this
    process. Closed at the end of the process at the latest.
    """

    def __init__(self, arrays: Mapping[str, SharedArray], participant: Participant | None) -> None:
        self.arrays = dict(arrays)
        self.shared = participant is not None
        """False if other processes cannot find them."""
        self._finish = weakref.finalize(self, _close_participant, participant)

    def __getitem__(self, name: str) -> SharedArray:
        return self.arrays[name]

    def close(self) -> None:
        """Stop keeping them findable; may be called again."""
        self._finish()

    def __enter__(self) -> SharedArrays:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _close_participant(participant: Participant | None) -> None:
    if participant is not None:
        participant.close()


def open_arrays(key: str, layout: Layout, *, share: bool = True) -> SharedArrays:
    """Return the arrays that this user's processes share under ``key``, zeros if they are new.

    For data that the ranks of one job on one node write together, such as which samples were
    served: ``key`` must be the job's own. Different layouts under one key stay separate. The arrays
    are freed with the last process that has them. If sharing fails there is a warning and private
    arrays, as with ``share=False``.

    Safe in any thread and process. Raises :class:`~stoker.errors.CapacityError` when the memory
    is not there.
    """
    plain = {name: [int(size), np.dtype(dtype).str] for name, (size, dtype) in layout.items()}
    wanted = Announcement(
        key=key,
        token=secrets.token_hex(16),
        description=f"arrays {', '.join(layout)}",
        capacity_bytes=0,  # pages come as they are written: nothing is reserved that takes time
        regions=[],
        meta={},
        stats={},
        kind="arrays",
    )
    if share and sys.platform == "linux":
        try:
            joined = join_or_create(
                wanted, f"{key} {sorted(plain.items())}", lambda: _make(plain), _attach
            )
            return SharedArrays(joined.held.arrays, joined.participant)
        except UntrustedPath:
            raise  # processes that each have their own would not know of each other's
        except OSError as error:
            message = f"other processes cannot share {', '.join(layout)}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return SharedArrays(_created(plain), None)


class _Arrays:
    """Arrays in a form that can be passed on."""

    def __init__(self, arrays: dict[str, SharedArray], meta: dict[str, Any]) -> None:
        self.arrays = arrays
        self.handle = Handle(tuple(array.fileno() for array in arrays.values()), meta)

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        """Do nothing: memory goes with its last user."""


def _created(plain: dict[str, list[Any]]) -> dict[str, SharedArray]:
    return {
        name: SharedArray.create(size, dtype, name=f"stoker-{name}")
        for name, (size, dtype) in plain.items()
    }


def _make(plain: dict[str, list[Any]]) -> _Arrays:
    return _Arrays(_created(plain), {"arrays": plain})


def _attach(handle: Handle) -> _Arrays:
    """Map what another process passed; SegmentError if it is not as announced."""
    plain = handle.meta.get("arrays", {})
    if len(plain) != len(handle.fds):
        raise SegmentError(f"{len(handle.fds)} descriptors for the arrays {[*plain]}")
    arrays = {}
    for fd, (name, (size, dtype)) in zip(handle.fds, plain.items(), strict=True):
        if os.fstat(fd).st_size < math.prod((int(size), np.dtype(dtype).itemsize)):
            raise SegmentError(f"the memory of {name!r} is smaller than said")
        arrays[name] = SharedArray.attach(fd, int(size), dtype, name=f"stoker-{name}")
    return _Arrays(arrays, dict(handle.meta))
