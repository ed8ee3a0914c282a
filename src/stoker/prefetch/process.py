"""The prefetch process: ``python -m stoker.prefetch.process JOB LISTENER LOCK``.

The arguments are descriptors: of the pickled job, of the socket where ranks connect, and of the
lock that says there is such a process. It ends when no rank is connected any more.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.prefetch.channel import ALIVE_EVERY, Channel, pid_namespace
from stoker.prefetch.feed import Feed, Group, Segment
from stoker.prefetch.fetcher import WINDOW, Fetcher
from stoker.prefetch.job import Job
from stoker.prefetch.marks import Marks
from stoker.source.remote.client import serve_clients_here

log = logging.getLogger("stoker.prefetch")

_LINGER = 5.0  # seconds to wait for the first rank
_AFTERWARDS = 0.5  # and for another one after the last: memory and disk are held meanwhile
_BUSY, _IDLE = 0.001, 0.02  # seconds between two looks at what was served


class Rank:
    """One connected rank: its channel, its membership of the arena, its feed."""

    def __init__(self, channel: Channel, job: Job) -> None:
        self.channel = channel
        self.tier = job.tier.attached()
        for arena in self.tier.arenas:
            arena.reclaim()  # what a dead predecessor held would be in our way
        self.feed = Feed(job.source.sizes, 0)
        self.fresh = np.zeros(len(job.source), np.uint8)
        self.ready: deque[Group] = deque()
        self._sizes = job.source.sizes
        self._asked = 0

    def hear(self) -> bool:
        """Take one message; False when the rank has gone or makes no sense."""
        try:
            received = self.channel.receive()
        except OSError:
            return False
        if received is None:
            return False
        message, fds = received
        try:
            return self._obey(message, fds)
        except (KeyError, ValueError, TypeError, OSError, IndexError):
            log.info("a rank sent what is no order: %s", message)
            return False
        finally:
            for fd in fds:
                os.close(fd)

    def _obey(self, message: dict[str, object], fds: list[int]) -> bool:
        order = message["order"]
        if order == "join":
            self._asked = int(str(message["window_bytes"]))
            self.feed = Feed(self._sizes, self._asked)
            self.fresh = _mapped(fds[0], np.uint8)
        elif order == "segment":
            ids = _mapped(fds[0], np.uint32)[: int(str(message["length"]))]
            keys = _mapped(fds[2], np.float64)[: len(ids)] if len(fds) > 2 else None
            marks = Marks(_mapped(fds[1], np.uint8))
            if ids.size and int(ids.max()) >= len(self._sizes):
                raise ValueError("ids are out of range")
            generation = int(str(message["generation"]))
            self.feed.add(Segment(int(str(message["epoch"])), ids, keys, marks, generation))
        elif order == "reset":
            self.feed.reset()
        else:
            raise ValueError("unknown order")
        return True

    @property
    def held(self) -> int:
        """Bytes that lie ready, or are on their way."""
        return sum(int(self._sizes[group.ids].sum()) for group in self.ready)

    def limit(self, window_bytes: int) -> None:
        """Let no more than this lie ready, nor more than was asked for."""
        self.feed.resize(min(window_bytes, self._asked))

    def close(self) -> None:
        """Let go of the rank; its leases end."""
        self.channel.close()
        self.tier.close()


def serve(job: Job, listener: socket.socket) -> None:
    """Prefetch for the ranks that connect, until there have been none for a while."""
    listener.setblocking(False)
    fetcher = Fetcher(job.source)
    room = int(job.tier.arena.stats()["regions"][WINDOW]["budget"])
    ranks: dict[int, Rank] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    said = last = time.monotonic()
    pause = _BUSY
    patience = _LINGER
    is_settled = False
    while ranks or time.monotonic() - last < patience:
        for fd, _ in poll.poll(pause * 1000):
            if fd == listener.fileno():
                _admit(listener, job, ranks, poll)
            elif not ranks[fd].hear():
                poll.unregister(fd)
                ranks.pop(fd).close()
            is_settled = False
        if ranks and not is_settled:
            is_settled = _divide(room, list(ranks.values()))
        now = time.monotonic()
        if ranks:
            last, patience = now, _AFTERWARDS
        if now - said >= ALIVE_EVERY:
            said = now
            _tell_alive(ranks)
        try:
            pause = _BUSY if fetcher.step(list(ranks.values())) else min(_IDLE, pause * 1.5)
        except (StokerError, OSError) as error:
            log.info("the cache is not to be had: %s", error)
            pause = _IDLE
    fetcher.close()


def _admit(listener: socket.socket, job: Job, ranks: dict[int, Rank], poll: select.poll) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    connection.setblocking(True)
    channel = Channel(connection)
    if channel.user() != os.geteuid():
        channel.close()
        return
    ranks[channel.fileno()] = Rank(channel, job)
    poll.register(channel.fileno(), select.POLLIN)


def _divide(room: int, ranks: list[Rank]) -> bool:
    """Give each rank its share of the region; False while one holds more than that.

    The region was made for the ranks of one job, and what does not fit would be read in vain.
    """
    share = room // len(ranks)
    over = sum(max(0, rank.held - share) for rank in ranks)
    for rank in ranks:
        rank.limit(max(0, share - over))
    return over == 0


def _tell_alive(ranks: dict[int, Rank]) -> None:
    alive = {"pid": os.getpid(), "namespace": pid_namespace()}
    for rank in ranks.values():
        with contextlib.suppress(OSError):
            rank.channel.send(alive)


def _mapped(fd: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the shared memory of ``fd`` as an array; it stays mapped as long as the array."""
    size = os.fstat(fd).st_size
    return np.frombuffer(mmap.mmap(fd, size), dtype, size // np.dtype(dtype).itemsize)


def main() -> None:
    """Run the process on the descriptors given as arguments."""
    if os.fork():  # whoever started us need not wait for our end
        os._exit(0)
    job_fd, listener_fd, lock_fd = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop
    os.set_inheritable(lock_fd, False)
    serve_clients_here()
    with os.fdopen(job_fd, "rb") as file:
        job: Job = pickle.load(file)
    # Open the storage before anything is claimed, or the workers would wait for that.
    with contextlib.suppress(StokerError, OSError):
        job.source.read_packed(np.empty(0, np.uint32))
    serve(job, socket.socket(fileno=listener_fd))
    logging.shutdown()
    os._exit(0)  # clients of storages run threads that do not end


if __name__ == "__main__":
    main()
