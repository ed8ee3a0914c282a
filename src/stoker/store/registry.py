"""One arena per data set and user: found, made, listed, cleaned up after."""

from __future__ import annotations

import random
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from stoker import _core
from stoker.errors import SegmentError
from stoker.policy.base import Region
from stoker.store import handshake, unforked
from stoker.store.arena import Arena, Handle
from stoker.store.handshake import Announcement
from stoker.store.keeper import Keeper
from stoker.store.place import Place
from stoker.store.runtime_dir import existing_runtime_dir, prepare_runtime_dir
from stoker.types import format_bytes

_PATIENCE = 5.0  # seconds for a holder to take over
_RESERVING = 0.5e9  # bytes per second, at least, at which another process reserves memory


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
    with a warning if it has another size or other regions. When sharing fails (no safe runtime
    directory, a holder that does not answer) there is a warning and an arena of this process's
    own, as with ``share=False``.

    Safe in any thread and process. Raises :class:`~stoker.errors.CapacityError` when the memory
    is not there and :class:`~stoker.errors.ConfigError` for arguments the arena refuses.
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
    )
    if share and sys.platform == "linux":
        try:
            return _open_shared(wanted, num_ids, make_configured)
        except OSError as error:
            message = f"other processes cannot share this cache: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return SharedArena(make_configured(), created=True, keeper=None)


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
        found.append(ArenaInfo(said.key, said.description, said.capacity_bytes, said.stats, pid))
    return sorted(found, key=lambda info: info.key)


def clean() -> int:
    """Remove what dead processes left in the runtime directory; return how many arenas' files.

    Touches only sockets and lock files, and nothing in a directory without Stoker's marker.
    Memory needs no cleaning: it went with the last process that held it.
    """
    folder = existing_runtime_dir()
    return sum(place.clean() for place in Place.all(folder)) if folder else 0


def _open_shared(wanted: Announcement, num_ids: int, make: Callable[[], Arena]) -> SharedArena:
    # Whoever could not use the arena, for its number of ids or its layout, does not meet it.
    place = Place.of(prepare_runtime_dir(), f"{wanted.key} {num_ids} {_core.ABI}")
    begin, pause = time.monotonic(), 0.002
    while True:
        try:
            return _attach(place, wanted)
        except (OSError, SegmentError) as error:
            why = str(error)  # the error itself would keep this frame alive
            silent = isinstance(error, TimeoutError | BlockingIOError)
        created = _create(place, wanted, make)
        if created is not None:
            return created
        # Nobody at the socket: a process may be reserving a large arena's memory right now.
        patience = _PATIENCE + (0 if silent else wanted.capacity_bytes / _RESERVING)
        if time.monotonic() - begin > patience:
            raise TimeoutError(f"{place.socket} does not answer: {why}")
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(0.1, pause * 1.5)


def _attach(place: Place, wanted: Announcement) -> SharedArena:
    """Take part in the arena that is served there; OSError or SegmentError if there is none."""
    said, fds, _ = handshake.inquire(place.socket)
    try:
        serve, holders = place.join(said.token)
        try:
            arena = Arena.attach(Handle(tuple(fd.fileno() for fd in fds), said.meta))
            keeper = Keeper(place, serve, holders, None, arena, said)
        except BaseException:
            place.leave(serve, holders)
            raise
    finally:
        for fd in fds:
            unforked.drop(fd)
    _warn_of_differences(said, wanted)
    return SharedArena(arena, created=False, keeper=keeper)


def _create(place: Place, wanted: Announcement, make: Callable[[], Arena]) -> SharedArena | None:
    """Make the arena and serve it; None if another process does, or still has one."""
    serve = place.try_serve()
    if serve is None:
        return None
    holders = None
    try:
        holders = place.try_alone(wanted.token)
    finally:
        if holders is None:
            unforked.drop(serve)
    if holders is None:
        return None
    arena = listener = None
    try:
        arena = make()
        said = Announcement(**{**vars(wanted), "meta": arena.handle.meta})
        listener = handshake.listen(place.socket)
        keeper = Keeper(place, serve, holders, listener, arena, said)
    except BaseException:
        if listener is not None:
            unforked.drop(listener)
        if arena is not None:
            arena.close()
        place.leave(serve, holders)
        raise
    return SharedArena(arena, created=True, keeper=keeper)


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
