"""The thread that keeps a shared arena findable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from stoker.errors import StokerError
from stoker.store import handshake, unforked
from stoker.store.handshake import Announcement
from stoker.store.ofd import is_locked, try_lock
from stoker.store.place import Place
from stoker.store.unforked import Descriptor

if TYPE_CHECKING:
    from stoker.store.meeting import Shareable

_TAKEOVER = 0.2  # seconds between two looks whether the place of the one who answers is free


class Keeper:
    """Makes this process a holder of an arena: answers for it, or stands by to take over.

    Every holder runs one. The one with the ``serve`` lock answers on the socket; when its process
    ends, even if killed, another gets the lock within a fraction of a second. The others poll the
    lock instead of blocking on it, because a blocked thread could not be stopped. In a forked child
    it is inert: the child neither answers nor counts as a holder.

    ``serve`` and ``holders`` come from :class:`~stoker.store.place.Place` and belong to the
    keeper; with ``listener`` it answers from the start. Raises :class:`OSError` when the arena's
    descriptors cannot be duplicated.
    """

    def __init__(
        self,
        place: Place,
        serve: Descriptor,
        holders: Descriptor,
        listener: socket.socket | None,
        arena: Shareable,
        announcement: Announcement,
    ) -> None:
        self._place, self._serve, self._holders = place, serve, holders
        self._listener = listener
        self._arena = arena
        self._announcement = announcement
        self._generation = unforked.generation()
        self._own: list[Descriptor] = []
        try:
            with unforked.no_fork:
                self._wake = self._keep(os.eventfd(0, os.EFD_CLOEXEC))
                # Copies: the arena may be closed first, and its numbers then mean other files.
                self._fds = [self._keep(os.dup(fd)) for fd in arena.handle.fds]
            self._thread = threading.Thread(target=self._run, name="stoker-keeper", daemon=True)
            self._thread.start()
        except BaseException:
            for descriptor in self._own:
                unforked.drop(descriptor)
            raise

    def close(self) -> None:
        """Stop answering and holding; the last holder removes the files. May be called again."""
        if self._generation != unforked.generation() or not self._thread.is_alive():
            return  # in a child of a fork there is no thread, and nothing left to close
        os.eventfd_write(self._wake.fileno(), 1)
        # The garbage collector may have brought the thread itself here.
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_alone(self) -> bool:
        """Whether no other process holds it; raises OSError when closed."""
        return not is_locked(self._holders.fileno())

    def _keep(self, fd: int) -> Descriptor:
        self._own.append(unforked.keep(Descriptor(fd)))
        return self._own[-1]

    def _run(self) -> None:
        try:
            self._attend()
        finally:
            if self._listener is not None:
                unforked.drop(self._listener)
            with contextlib.suppress(OSError):  # files that stay are for `stoker clean`
                self._place.leave(self._serve, self._holders)
            for descriptor in self._own:
                unforked.drop(descriptor)

    def _attend(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        while True:
            if self._listener is None:
                self._listener = self._take_over()
                if self._listener is not None:
                    poll.register(self._listener, select.POLLIN)
            ready = poll.poll(None if self._listener else _TAKEOVER * 1000)
            if any(fd == self._wake.fileno() for fd, _ in ready):
                return
            if ready and self._listener is not None:
                self._answer(self._listener)

    def _take_over(self) -> socket.socket | None:
        if not try_lock(self._serve.fileno()):
            return None
        try:
            return handshake.listen(self._place.socket)
        except OSError:
            return None  # keeps the lock and tries again: no other process would do better

    def _answer(self, listener: socket.socket) -> None:
        said = dataclasses.replace(self._announcement, stats=self._stats())
        handshake.answer(listener, said, [descriptor.fileno() for descriptor in self._fds])

    def _stats(self) -> dict[str, Any]:
        try:
            with unforked.no_fork:  # a lock of the arena's, taken here, must not stay so in a child
                return dict(self._arena.stats())
        except (StokerError, OSError):
            return {}  # closed meanwhile; the memory is still there to attach to
