"""How processes get the same shared memory: one makes it, the others find it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stoker.errors import SegmentError
from stoker.runtime_dir import prepare_runtime_dir
from stoker.store import handshake, unforked
from stoker.store.arena import Handle
from stoker.store.handshake import Announcement
from stoker.store.keeper import Keeper
from stoker.store.place import Place

_PATIENCE = 5.0  # seconds for a holder to take over
_RESERVING = 0.5e9  # bytes per second, at least, at which another process reserves memory


class Shareable(Protocol):
    """Memory that can be passed on by its descriptors."""

    @property
    def handle(self) -> Handle:
        """Its descriptors, and what is needed to use them."""
        ...

    def stats(self) -> dict[str, object]:
        """Return its current statistics."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


_T = TypeVar("_T", bound=Shareable)


@dataclass(frozen=True)
class Met(Generic[_T]):
    """Shared memory, and this process's part in keeping it findable."""

    held: _T
    keeper: Keeper
    said: Announcement | None
    """What its holder said of it; None if it was made here."""


def meet(
    wanted: Announcement, key: str, make: Callable[[], _T], attach: Callable[[Handle], _T]
) -> Met[_T]:
    """Return what this user's processes share under ``key``, made by ``make`` if necessary.

    Safe in any thread and process. Raises :class:`OSError` when the runtime directory is not safe
    or a holder does not answer, and whatever ``make`` raises.
    """
    place = Place.of(prepare_runtime_dir(), key)
    begin, pause = time.monotonic(), 0.002
    while True:
        try:
            return take_part(place, attach)
        except (OSError, SegmentError) as error:
            why = str(error)  # the error itself would keep this frame alive
            silent = isinstance(error, TimeoutError | BlockingIOError)
        created = _create(place, wanted, make)
        if created is not None:
            return created
        # No process at the socket: one may be reserving a large arena's memory right now.
        patience = _PATIENCE + (0 if silent else wanted.capacity_bytes / _RESERVING)
        if time.monotonic() - begin > patience:
            raise TimeoutError(f"{place.socket} does not answer: {why}")
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(0.1, pause * 1.5)


def take_part(place: Place, attach: Callable[[Handle], _T]) -> Met[_T]:
    """Become a holder of the memory served there; OSError or SegmentError if there is none."""
    said, fds, _ = handshake.inquire(place.socket)
    try:
        serve, holders = place.join(said.token)
        try:
            held = attach(Handle(tuple(fd.fileno() for fd in fds), said.meta))
            keeper = Keeper(place, serve, holders, None, held, said)
        except BaseException:
            place.leave(serve, holders)
            raise
    finally:
        for fd in fds:
            unforked.drop(fd)
    return Met(held, keeper, said)


def _create(place: Place, wanted: Announcement, make: Callable[[], _T]) -> Met[_T] | None:
    """Make it and serve it; None if another process does, or still has one."""
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
    made = listener = None
    try:
        made = make()
        said = Announcement(**{**vars(wanted), "meta": dict(made.handle.meta)})
        listener = handshake.listen(place.socket)
        keeper = Keeper(place, serve, holders, listener, made, said)
    except BaseException:
        if listener is not None:
            unforked.drop(listener)
        if made is not None:
            made.close()
        place.leave(serve, holders)
        raise
    return Met(made, keeper, None)
