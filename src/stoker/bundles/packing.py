"""The packaging process, which is :func:`main`.

Its arguments are those of :func:`stoker.node.supervised.run`. One thread packs, one loads, and
one listens to the ranks, so that a storage that hangs does not make the process look dead.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from stoker.bundles.depot import Depot, open_depot
from stoker.bundles.packager import Flags, Job, Totals
from stoker.bundles.workshop import Epoch, Loaded, Workshop
from stoker.errors import CapacityError, StokerError
from stoker.node.messages import Channel
from stoker.node.supervised import Members, mapped, run
from stoker.source.remote.client import serve_clients_here
from stoker.store.arena import Arena
from stoker.store.tier import Mask

log = logging.getLogger("stoker.bundles")

_LISTEN = 0.1  # seconds for a message, before looking whether there is trouble
_IDLE, _LONGEST_IDLE = 0.005, 0.05  # seconds between two looks at what was served
_PATIENCE = 0.5  # seconds to wait at the end for what is under way: memory is held meanwhile
_BACK_OFF, _LONGEST = 0.5, 60.0  # seconds after a failure, doubled up to the longest


class Rank:
    """One connected rank, and what it says of the epoch."""

    def __init__(self, channel: Channel, job: Job, flags: Flags, totals: Totals) -> None:
        self.channel = channel
        self.epoch: Epoch | None = None
        self.missed = np.zeros(len(job.source), np.bool_)
        """``bool[N]``: what it missed, since this was last taken."""
        self._low, self._flags, self._totals = job.low, flags, totals
        self._outlets = np.empty(0, np.uint8), np.empty(0)

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take one order of the rank's."""
        order = message["order"]
        if order == "join":
            packaged = mapped(fds[0], np.uint8)[: len(self.missed)]
            self._outlets = packaged, mapped(fds[1], np.float64)
            self._flags.join(self._outlets[0])
            self._totals.join(self._outlets[1])
        elif order == "epoch":
            places = mapped(fds[0], np.uint8)[: len(self.missed)]
            missed = mapped(fds[1], np.uint32)[: int(message["missed"])]
            self.missed[missed] = True
            self.epoch = Epoch(int(message["epoch"]), int(message["stamp"]), places == self._low)
        else:
            raise ValueError("unknown order")

    def close(self) -> None:
        """Let go of the rank."""
        self.channel.close()
        self._flags.leave(self._outlets[0])
        self._totals.leave(self._outlets[1])


class Hands:
    """A thread that works over and over, and notes what keeps it from that.

    ``work`` does one step, and returns how many seconds there is nothing more to do.
    """

    def __init__(self, name: str, work: Callable[[], float]) -> None:
        self._name, self._work = name, work
        self.trouble: str | None = None
        """Why the last attempt failed, None if it did not."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stoker-{name}", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> None:
        """End; what is under way is waited for ``patience`` seconds: a storage may hang."""
        self._stop.set()
        self._thread.join(patience)

    def _run(self) -> None:
        pause = _BACK_OFF
        while not self._stop.is_set():
            try:
                idle = self._work()
            except Exception as error:  # also whatever a source of the user's raises
                log.info("%s failed: %r", self._name, error)
                expected = isinstance(error, StokerError | OSError)
                self.trouble = str(error) if expected else repr(error)
                self._stop.wait(pause)
                pause = min(_LONGEST, pause * 2)
            else:
                self.trouble, pause = None, _BACK_OFF
                self._stop.wait(idle)


class Packing:
    """Opens the depot and its workshop, and builds packages there."""

    def __init__(self, job: Job, make: Callable[[Depot], Workshop]) -> None:
        self._job, self._make = job, make
        self._depot: Depot | None = None
        self._lock = threading.Lock()
        self._first: tuple[Epoch, Mask] | None = None
        self.workshop: Workshop | None = None
        """None until the depot is open."""

    def begin(self, epoch: Epoch, missed: Mask) -> None:
        """Begin an epoch, now or when the depot is open."""
        with self._lock:
            if self.workshop is None:
                self._first = epoch, missed
            else:
                self.workshop.begin(epoch, missed)

    def __call__(self) -> float:
        """Do one step; raises OSError and ConfigError when the depot cannot be opened or used."""
        if self.workshop is None:
            self._open()
            return 0.0
        return 0.0 if self.workshop.build() else _IDLE

    def close(self) -> None:
        """Let go of the depot."""
        if self._depot is not None:
            self._depot.close()

    def _open(self) -> None:
        if self._depot is None:
            job = self._job
            self._depot = open_depot(job.location, job.is_private, job.group, job.holder)
        workshop = self._make(self._depot)
        workshop.adopt()
        with self._lock:
            if self._first is not None:
                workshop.begin(*self._first)
            self.workshop = workshop


class Loading:
    """Loads, and looks the less often the longer there was no room."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._pause = _IDLE

    def __call__(self) -> float:
        """Do one step; raises CapacityError when no package fits any more."""
        workshop = self._packing.workshop
        loaded = None if workshop is None else workshop.load()
        if loaded is Loaded.TOO_LARGE:
            raise CapacityError(
                "the cache of samples of low importance has become smaller than one package: "
                "give the cache more, or min_bytes less"
            )
        if loaded is Loaded.NO_ROOM or loaded is None:
            self._pause = min(_LONGEST_IDLE, self._pause * 1.5)
            return self._pause
        self._pause = _IDLE
        # A depot that loses everything must not make us read the source all the time.
        return _BACK_OFF if loaded is Loaded.LOST else 0.0


def serve(job: Job, listener: socket.socket) -> None:
    """Pack and load for the ranks that connect, until there have been none for a while."""
    arena = Arena.attach(job.arena)
    arena.reclaim()  # what a dead predecessor claimed would be in our way
    flags, totals = Flags(len(job.source)), Totals()
    packing = Packing(job, lambda depot: Workshop(job, arena, depot, flags, totals))
    ranks = Members(listener, lambda channel: Rank(channel, job, flags, totals))
    hands = [Hands("packing", packing), Hands("loading", Loading(packing))]
    current = None
    was_told = False
    while not ranks.are_gone:
        ranks.attend(_LISTEN)
        epoch = agreed(ranks.all)
        if epoch is not None and epoch is not current:
            if current is None or (epoch.number, epoch.stamp) != (current.number, current.stamp):
                packing.begin(epoch, take_missed(ranks.all))
            current = epoch
        trouble = next((hand.trouble for hand in hands if hand.trouble), None)
        if trouble and not was_told:
            ranks.tell({"trouble": trouble})
            was_told = True
    for hand in hands:
        hand.stop(_PATIENCE)
    packing.close()


def agreed(ranks: list[Rank]) -> Epoch | None:
    """Return the epoch that all ranks have begun, None if none has.

    Those that have not said anything yet are not waited for.
    """
    begun = [rank.epoch for rank in ranks if rank.epoch is not None]
    return min(begun, key=lambda epoch: epoch.stamp, default=None)


def take_missed(ranks: list[Rank]) -> Mask:
    """Return ``bool[N]``: what any rank has missed, and start counting from zero."""
    missed = np.logical_or.reduce([rank.missed for rank in ranks])
    for rank in ranks:
        rank.missed = np.zeros_like(missed)
    return cast(Mask, missed)


def main() -> None:
    """Be the process."""
    serve_clients_here()
    run(serve)
