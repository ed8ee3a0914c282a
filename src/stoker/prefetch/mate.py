"""A further process that reads for the prefetch process, which is :func:`main`.

Its arguments are descriptors: of the socket to that process, and of the pickled job. It asks for
a group when it has room for one, says what it claimed and when it is done, and ends with the
connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.node import child
from stoker.node.memory import keep_freed_memory
from stoker.node.messages import Channel
from stoker.node.supervised import ALIVE_EVERY, mapped
from stoker.prefetch.lanes import Work
from stoker.prefetch.prefetcher import Job
from stoker.prefetch.reading import Reader, entering
from stoker.prefetch.walk import Group, Marks, Segment
from stoker.source.base import Room
from stoker.source.packed import Buffer
from stoker.source.remote.client import serve_clients_here
from stoker.store.flight import Meter

_NO_IDS = np.empty(0, np.uint32)


class _Destination:
    """What is brought for one rank goes here."""

    def __init__(self, job: Job, fresh: NDArray[np.uint8], entrance: str) -> None:
        self.tier = entering(job.tier, entrance)
        self.fresh = fresh
        self.meter = Meter(np.zeros(3))  # the other process counts
        self.marks: dict[int, Marks] = {}


class _Told:
    """Work of which the other process is told when all of the group is done."""

    def __init__(self, work: Work, chunk: _Chunk) -> None:
        self._work, self._chunk = work, chunk
        self.num_pieces = work.num_pieces

    def begin(self, piece: int) -> int | None:
        return self._work.begin(piece)

    def read(self, piece: int) -> int:
        return self._count(self._work.read(piece))

    def room(self, piece: int) -> Room | None:
        return self._work.room(piece)

    def keep(self, piece: int, buffer: Buffer) -> int:
        return self._count(self._work.keep(piece, buffer))

    def _count(self, num_bytes: int) -> int:
        self._chunk.num_bytes += num_bytes
        return num_bytes

    def finish(self) -> bool:
        is_fine = self._work.finish()
        self._chunk.finish(is_fine)
        return is_fine


class _Chunk:
    """One group in hand."""

    def __init__(self, mate: Mate, number: int, read: int, works: int) -> None:
        self._mate, self._number, self._read, self._left = mate, number, read, works
        self._is_fine = True
        self.num_bytes = 0  # about: its threads add to it at the same time

    def finish(self, is_fine: bool) -> None:
        """Note that a part is finished."""
        with self._mate.mutex:
            self._left -= 1
            self._is_fine = self._is_fine and is_fine
            is_last = self._left <= 0
        if is_last:
            self._mate.tell(
                {
                    "done": self._number,
                    "read": self._read,
                    "bytes": self.num_bytes,
                    "fine": self._is_fine,
                    "cpu": time.process_time(),
                }
            )


class Mate:
    """Reads what it is handed over ``channel``."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self.mutex = threading.Lock()
        self._job, self._channel = job, channel
        self._reader = Reader(job.source, job.pool)
        self._destinations: dict[int, _Destination] = {}
        self._has_asked = False

    def tell(self, message: dict[str, Any]) -> None:
        """Say something; any thread."""
        with self.mutex:
            self._channel.send(message)

    def run(self) -> None:
        """Serve until the other process is gone."""
        lanes = self._reader.lanes
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(lanes.fileno(), select.POLLIN)
        said = 0.0
        while True:
            if not self._has_asked and lanes.has_room:
                self._has_asked = True
                self.tell({"want": True})
            if time.monotonic() - said > ALIVE_EVERY:
                said = time.monotonic()
                self.tell({})
            ready = dict(poll.poll(ALIVE_EVERY * 1000))
            lanes.hear()
            if self._channel.fileno() in ready:
                received = self._channel.receive()
                if received is None:
                    return
                message, fds = received
                self._obey(message, fds)
                for fd in fds:
                    os.close(fd)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        order, rank = message["order"], int(message["rank"])
        if order == "join":
            fresh, entrance = mapped(fds[0], np.uint8), str(message["entrance"])
            self._destinations[rank] = _Destination(self._job, fresh, entrance)
        elif order == "marks":
            self._destinations[rank].marks[int(message["epoch"])] = Marks(mapped(fds[0], np.uint8))
        elif order == "leave":
            self._destinations.pop(rank, None)
        elif order == "bring":
            self._has_asked = False
            self._bring(self._destinations[rank], message)

    def _bring(self, destination: _Destination, message: dict[str, Any]) -> None:
        epoch, keys, early = int(message["epoch"]), message["keys"], message["early"]
        marks = destination.marks[epoch]
        group = Group(
            np.array(message["ids"], np.uint32),
            None if keys is None else np.array(keys, np.float64),
            0,
            Segment(epoch, _NO_IDS, None, marks, int(message["generation"])),
            np.array(message["offsets"], np.int64),
            True,
            0,
            None if early is None else np.array(early, np.bool_),
        )
        works, read = self._reader.claim(destination, group)
        number = int(message["chunk"])
        self.tell({"claimed": number, "own": read})
        chunk = _Chunk(self, number, read, len(works))
        for work in works:
            self._reader.lanes.add(_Told(work, chunk))
        if not works:
            chunk.finish(True)


def main() -> None:
    """Be the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop
    serve_clients_here()
    keep_freed_memory()
    number, *given = map(int, sys.argv[1:])
    job = child.load(given)
    with contextlib.suppress(OSError):  # the other process is gone
        Mate(job, Channel(socket.socket(fileno=number))).run()
    os._exit(0)  # clients of storages run threads that do not end
