"""One arena per data set and user: found, made, listed, cleaned up after."""

from __future__ import annotations

import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from stoker import _core
from stoker.errors import UntrustedPlace
from stoker.policy.base import Region
from stoker.runtime_dir import existing_runtime_dir
from stoker.store import handshake, unforked
from stoker.store.arena import Arena
from stoker.store.handshake import Announcement
from stoker.store.keeper import Keeper
from stoker.store.meeting import meet
from stoker.store.place import Place
from stoker.types import format_bytes

ARENA = "arena"
"""What a holder announces as its kind."""


class SharedArena:
    """An open arena, and this process's part in keeping it findable for others.

    Also a context manager. Forked children may go on using :attr:`arena`; they keep it alive
    but not findable. Closed at the end of the process at the latest.
    """

    def __init__(self, arena: Arena, *, created: bool, keeper: Keeper | None) -> None:
        self.arena = arena
        self.created = created
        """True if this call made the arena, False if it was there."""
        self.shared = keeper is not None
        """False if other processes cannot find it by its key."""
        # Runs when the object is collected or the interpreter ends, if not before.
        self._finish = weakref.finalize(self, _finish, arena, keeper)

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


def _finish(arena: Arena, keeper: Keeper | None) -> None:
    try:
        if keeper is not None:
            keeper.close()
    finally:
        arena.close()


@dataclass(frozen=True)
class ArenaInfo:
    """What is known of a live arena."""

    key: str
    description: str
    """As its creator described it: the data set's root, say."""
    capacity_bytes: int
    stats: dict[str, Any]
    """The arena's counters, empty if they could not be had."""
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
) -> SharedArena:
    """Return the arena that this user's processes share under ``key``, made if need be.

    ``key`` stands for the data set's content and the cache stage; together with ``num_ids`` and
    the segment's ABI it makes the arena's identity. The other arguments are for the case that
    it is new; ``make`` then makes one that is not in memory. One that exists is taken as it is,
    with a warning if it has another size or other regions. When sharing fails (no place for a
    runtime directory, a holder that does not answer) there is a warning and an arena of this
    process's own, as with ``share=False``.

    Safe in any thread and process. Raises :class:`~stoker.errors.CapacityError` when the memory
    is not there, :class:`~stoker.errors.ConfigError` for arguments the arena refuses, and
    :class:`~stoker.errors.UntrustedPlace` for a runtime directory that others may have a hand in.
    """

    def make_configured() -> Arena:
        arena = Arena(num_ids, capacity_bytes, mean_size) if make is None else make()
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
            # Whoever could not use the arena, for its number of ids or layout, does not meet it.
            met = meet(wanted, meeting_key(key, num_ids), make_configured, Arena.attach)
            if met.said is not None:
                _warn_of_differences(met.said, wanted)
            return SharedArena(met.held, created=met.said is None, keeper=met.keeper)
        except UntrustedPlace:
            raise  # each rank would reserve a cache of its own
        except OSError as error:
            message = f"other processes cannot share this cache: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return SharedArena(make_configured(), created=True, keeper=None)


def meeting_key(key: str, num_ids: int) -> str:
    """Return what processes that share an arena meet by."""
    return f"{key} {num_ids} {_core.ABI}"


def list_arenas() -> list[ArenaInfo]:
    """Return this user's live arenas that answer, sorted by key."""
    folder = existing_runtime_dir()
    found = []
    for place in Place.all(folder) if folder else []:
        try:
            said, fds, pid = handshake.inquire(place.socket)
        except OSError:
            continue
        for fd in fds:
            unforked.drop(fd)
        if said.kind != ARENA:
            continue
        found.append(ArenaInfo(said.key, said.description, said.capacity_bytes, said.stats, pid))
    return sorted(found, key=lambda info: info.key)


def clean() -> int:
    """Remove what dead processes left in the runtime directory; return how many arenas' files.

    Touches only sockets and lock files, and nothing in a directory without Stoker's marker.
    Memory needs no cleaning: it went with the last process that held it.
    """
    folder = existing_runtime_dir()
    return sum(place.clean() for place in Place.all(folder)) if folder else 0


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
