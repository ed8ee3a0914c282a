"""Further processes that read, where one interpreter does not keep up with the storage."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import subprocess
import time
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from stoker.errors import StokerError
from stoker.node import child
from stoker.node.descriptors import Descriptor
from stoker.node.messages import Channel
from stoker.node.supervisor import Silence
from stoker.prefetch.reading import Destination
from stoker.prefetch.walk import Group

log = logging.getLogger("stoker.prefetch")

_GAIN = 1.1  # throughput must grow at least so much for one more process to stay
_BUSY = 0.75  # of a core each, above which one more may help
_ENOUGH = 0.6  # of a core each, below which one fewer is enough
_SETTLING = 2  # intervals until a new process has come up
_CALM = 30  # intervals between two attempts to grow
_IDLE = 5  # intervals with too little to do before one goes
_MOST_DEATHS = 5  # within so many seconds; then no more are started for as long
_SOON = 30.0


class Headcount:
    """How many processes read: one more while it makes reading faster, one fewer while they idle.

    1 to ``most``. Each call of :meth:`measured` is about an interval of a second or so. It looks
    at no clock. Not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self.wanted = 1
        """Processes that should read now."""
        self._most = most
        self._before: float | None = None  # the rate before the attempt under way
        self._quiet = self._idle = 0

    def measured(self, rate: float, busy: float, is_held_back: bool) -> None:
        """Note an interval: bytes a second, processor seconds a second of all processes together.

        ``is_held_back``: more would have been read if they had been able to.
        """
        self._idle = self._idle + 1 if busy < _ENOUGH * (self.wanted - 1) else 0
        if self._quiet > 0:
            self._quiet -= 1
        elif self._before is not None:
            before, self._before = self._before, None
            if is_held_back and rate < before * _GAIN:
                self.wanted -= 1
                self._quiet = _CALM
        elif self._idle >= _IDLE:
            self.wanted -= 1
            self._idle = 0
        elif is_held_back and busy > _BUSY * self.wanted and self.wanted < self._most:
            self._before = rate
            self.wanted += 1
            self._quiet = _SETTLING


class CrewDestination(Destination, Protocol):
    """A rank that other processes read for."""

    number: int
    """Tells it from the other ranks."""


P = TypeVar("P", bound=CrewDestination)


class _Handed(Generic[P]):
    """A group that another process reads."""

    __slots__ = ("destination", "group", "is_claimed", "is_metered")

    def __init__(self, destination: P, group: Group) -> None:
        self.destination, self.group = destination, group
        self.is_claimed = self.is_metered = False

    def claimed(self, own: int) -> None:
        """Note that the process has claimed so many of it, and reads them."""
        self.is_claimed = True
        if own:
            self.is_metered = True
            self.destination.meter.begin()

    def done(self, read: int) -> None:
        """Note that it is over, with so many read."""
        if self.is_metered:
            self.destination.meter.end(read)


class _Rank(NamedTuple):
    """What a process must know of a rank."""

    fresh: Descriptor
    entrance: str
    marks: dict[int, Descriptor]
    """By epoch, the latest ones."""


def _join_order(number: int, rank: _Rank) -> dict[str, Any]:
    return {"order": "join", "rank": number, "entrance": rank.entrance}


class _Mate(Generic[P]):
    """One further process."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.process, self.channel = process, channel
        self.has_asked = self.is_leaving = False
        self.handed: dict[int, _Handed[P]] = {}
        self.cpu_seconds = 0.0
        self.silence = Silence()

    @property
    def wants(self) -> bool:
        """Whether it has asked for a group, got none since, and is to stay."""
        return self.has_asked and not self.is_leaving


class Crew(Generic[P]):
    """The processes besides this one that read for the ranks.

    Each asks for a group when it has room for one, so a slow one delays no other. What one that
    dies had in hand is given back by :meth:`hear`, to be read by another; its claims end with it.
    Whatever fails here costs speed only. One thread; :meth:`fileno` is readable when there is
    something to hear.
    """

    def __init__(self, job: object) -> None:
        """``job`` is pickled for each process; see :mod:`stoker.prefetch.mate`."""
        self._job = job
        self._mates: dict[int, _Mate[P]] = {}
        self._ranks: dict[int, _Rank] = {}
        self._lost: list[_Handed[P]] = []
        self._numbers = count()
        self._deaths: list[float] = []
        self._poll = select.epoll()
        self.read_bytes = 0
        """Bytes that these processes have read."""
        self.cpu_seconds = 0.0
        """Processor seconds that they have used."""
        self.has_failed = False
        """Whether the storage gave up, as one of them says; to be reset by who looks."""

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._poll.fileno()

    def watch(self, fd: int) -> None:
        """Make the descriptor readable when ``fd`` is, too."""
        self._poll.register(fd, select.EPOLLIN)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [mate.process.pid for mate in self._mates.values()]

    @property
    def has_room(self) -> bool:
        """Whether one of them has asked for a group."""
        return any(mate.wants for mate in self._mates.values())

    @property
    def is_idle(self) -> bool:
        """Whether none of them has anything in hand."""
        return not any(mate.handed for mate in self._mates.values())

    # --- how many ---

    def resize(self, wanted: int) -> None:
        """Start processes, or end them after what they have in hand, so that there are ``wanted``.

        To be called again now and then: those that died are replaced.
        """
        self.hear()  # what they said while this process itself did not run
        for number, mate in enumerate(self._mates.values()):
            mate.is_leaving = number >= wanted
        for fd in [fd for fd, mate in self._mates.items() if mate.is_leaving and not mate.handed]:
            self._drop(fd)
        for fd in [fd for fd, mate in self._mates.items() if mate.silence.is_hung()]:
            self._bury(fd)
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _SOON]
        while len(self._mates) < wanted and len(self._deaths) < _MOST_DEATHS:
            try:
                self._start()
            except (OSError, pickle.PicklingError, TypeError, AttributeError, StokerError) as error:
                self._deaths += [now] * _MOST_DEATHS
                log.info("one process reads alone: %s", error)

    def _start(self) -> None:
        process, connection = self._launch()
        mate: _Mate[P] = _Mate(process, Channel(connection))
        self._mates[connection.fileno()] = mate
        self._poll.register(connection.fileno(), select.EPOLLIN)
        for number, rank in self._ranks.items():
            self._tell(mate, _join_order(number, rank), rank.fresh)
            for epoch, marks in rank.marks.items():
                self._tell(mate, {"order": "marks", "rank": number, "epoch": epoch}, marks)

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a process and return it with our end of its socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, child.dumped(self._job) as job:
                given = [theirs.fileno(), *job]
                process = child.start("stoker.prefetch.mate", *given, fds=given)
        except BaseException:
            ours.close()
            raise
        return process, ours

    # --- the ranks ---

    def join(self, number: int, fresh: int, entrance: str = "") -> None:
        """Read for a rank from now on; ``fresh`` is the memory of :attr:`Destination.fresh`.

        ``entrance``: the region where its samples go, if it has one of its own.
        """
        rank = self._ranks[number] = _Rank(Descriptor(os.dup(fresh)), entrance, {})
        self._tell_all(_join_order(number, rank), rank.fresh)

    def mark(self, number: int, epoch: int, marks: int) -> None:
        """Learn the memory of the marks of one of the rank's epochs."""
        if number not in self._ranks:
            return
        known = self._ranks[number].marks
        for old in [e for e in known if e == epoch or len(known) > 2]:
            known.pop(old).close()
        known[epoch] = Descriptor(os.dup(marks))
        self._tell_all({"order": "marks", "rank": number, "epoch": epoch}, known[epoch])

    def leave(self, number: int) -> None:
        """Read for a rank no more."""
        rank = self._ranks.pop(number, None)
        if rank is not None:
            for descriptor in (rank.fresh, *rank.marks.values()):
                descriptor.close()
        self._tell_all({"order": "leave", "rank": number})

    def unclaimed(self, number: int) -> list[int]:
        """Return where groups of the rank's begin that were handed out and are not claimed yet."""
        return [
            each.group.first
            for mate in self._mates.values()
            for each in mate.handed.values()
            if not each.is_claimed and each.destination.number == number
        ]

    # --- groups ---

    def add(self, destination: P, group: Group) -> None:
        """Hand a group to a process that has asked for one, the one with least in hand."""
        mate = min((m for m in self._mates.values() if m.wants), key=lambda m: len(m.handed))
        chunk = next(self._numbers)
        mate.has_asked = False
        mate.handed[chunk] = _Handed(destination, group)
        order = {
            "order": "bring",
            "rank": destination.number,
            "chunk": chunk,
            "epoch": group.segment.epoch,
            "generation": group.segment.generation,
            "ids": group.ids.tolist(),
            "offsets": group.offsets.tolist(),
            "keys": None if group.keys is None else group.keys.tolist(),
            "early": None if group.is_early is None else group.is_early.tolist(),
        }
        self._tell(mate, order)

    def take_lost(self) -> list[tuple[P, Group]]:
        """Return what processes had in hand that are gone: it is to be read by others."""
        lost, self._lost = self._lost, []
        return [(handed.destination, handed.group) for handed in lost]

    def hear(self) -> None:
        """Take what the processes say."""
        while ready := [fd for fd, _ in self._poll.poll(0) if fd in self._mates]:
            for fd in ready:
                mate = self._mates[fd]
                if not self._hear(mate):
                    self._bury(fd)

    def close(self) -> None:
        """End the processes."""
        for fd in list(self._mates):
            self._drop(fd)
        for number in list(self._ranks):
            self.leave(number)

    # --- inside ---

    def _hear(self, mate: _Mate[P]) -> bool:
        """Take one message; False when the process is gone."""
        try:
            received = mate.channel.receive()
        except OSError:
            return False
        if received is None:
            return False
        message = received[0]
        mate.silence.end(mate.process.pid)
        mate.has_asked = mate.has_asked or "want" in message
        if "claimed" in message and message["claimed"] in mate.handed:
            mate.handed[message["claimed"]].claimed(int(message["own"]))
        if "done" in message and message["done"] in mate.handed:
            mate.handed.pop(message["done"]).done(int(message["read"]))
            self.read_bytes += int(message["bytes"])
            self.cpu_seconds += message["cpu"] - mate.cpu_seconds
            mate.cpu_seconds = message["cpu"]
            self.has_failed = self.has_failed or not message["fine"]
        return True

    def _bury(self, fd: int) -> None:
        """Note that a process died or hangs."""
        self._deaths.append(time.monotonic())
        log.info("a process that reads is gone, with %d groups", len(self._mates[fd].handed))
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        """End a process; what it had in hand is lost."""
        mate = self._mates.pop(fd)
        self._poll.unregister(fd)
        for handed in mate.handed.values():
            handed.done(0)
            handed.is_claimed = handed.is_metered = False
            self._lost.append(handed)
        mate.channel.close()
        mate.process.kill()  # its claims are free with it, and what it read is of no use any more
        mate.process.wait()

    def _tell_all(self, message: dict[str, Any], *given: Descriptor) -> None:
        for mate in self._mates.values():
            self._tell(mate, message, *given)

    @staticmethod
    def _tell(mate: _Mate[P], message: dict[str, Any], *given: Descriptor) -> None:
        with contextlib.suppress(OSError):  # it is found dead when it is heard
            mate.channel.send(message, [each.fileno() for each in given])
