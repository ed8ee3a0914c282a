"""The prefetch process, which is :func:`main`.

Its arguments are those of :func:`stoker.node.supervised.run`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections import deque
from itertools import count
from typing import Any

import numpy as np

from stoker.errors import StokerError
from stoker.node.bandwidth import FetchShare
from stoker.node.memory import keep_freed_memory
from stoker.node.messages import Channel
from stoker.node.supervised import Members, mapped, run
from stoker.prefetch.crew import Crew, Headcount
from stoker.prefetch.fetcher import Fetcher
from stoker.prefetch.prefetcher import Job, most_fetchers
from stoker.prefetch.reading import WINDOW, entering
from stoker.prefetch.walk import Blocks, Group, Marks, Segment, Walk
from stoker.source.remote.client import serve_clients_here
from stoker.store.flight import Meter
from stoker.store.substitutes import ByNeighbour, StandIns

log = logging.getLogger("stoker.prefetch")

_INTERVAL = 0.5  # seconds between two looks at how many processes should read
_ALL = 1 << 62  # positions
_numbers = count()
_LOOK = 0.25  # seconds between two looks at how large the window may be
_BUSY, _IDLE = 0.0005, 0.02  # seconds between two looks at what was served
_LOOKS = 8  # while as much is served as the last time


class Rank:
    """One connected rank: its channel, its membership of the arena, its walk."""

    def __init__(self, channel: Channel, job: Job, crew: Crew[Rank] | None) -> None:
        self.channel = channel
        self.number = next(_numbers)
        self._crew = crew
        self.tier = job.tier.attached()
        for arena in self.tier.arenas:
            arena.reclaim()  # what a dead predecessor held would be in our way
        self.walk = Walk(job.source.sizes, 0)
        self.fresh = np.zeros(len(job.source), np.uint8)
        self.meter = Meter(np.zeros(3))
        self.ready: deque[Group] = deque()
        self.spared: deque[Group] = deque()
        self.stand_ins: ByNeighbour | None = None
        self.fetch_share = FetchShare(0)
        self._sizes = job.source.sizes
        self._asked = 0

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Take one order of the rank's."""
        order = message["order"]
        if order == "join":
            self._asked = int(message["window_bytes"])
            self.walk = Walk(self._sizes, self._asked, self.tier.arena.capacity_bytes)
            self.fresh = mapped(fds[0], np.uint8)
            entrance = str(message["entrance"])
            self.tier = entering(self.tier, entrance)
            if self._crew is not None:
                self._crew.join(self.number, fds[0], entrance)
            self.meter = Meter(mapped(fds[1], np.float64))
            token, weight = message["fetch_share"]
            self.fetch_share = FetchShare(int(token), float(weight))
            if len(fds) > 2:
                table = StandIns.attach(fds[2:], len(self._sizes))
                self.stand_ins = ByNeighbour(self.tier, str(message["region"]), table)
        elif order == "segment":
            ids = mapped(fds[0], np.uint32)[: int(message["length"])]
            given = dict(zip(message["given"], fds[2:], strict=True))
            keys, before = (
                mapped(given[name], np.float64)[: len(ids)] if name in given else None
                for name in ("keys", "before")
            )
            blocks = None
            if "blocks" in given:
                blocks = Blocks(mapped(given["blocks"], np.uint32)[: len(ids)], before)
            marks = Marks(mapped(fds[1], np.uint8))
            if ids.size and int(ids.max()) >= len(self._sizes):
                raise ValueError("ids are out of range")
            epoch, generation = int(message["epoch"]), int(message["generation"])
            if self._crew is not None:
                self._crew.mark(self.number, epoch, fds[1])
            self.walk.add(Segment(epoch, ids, keys, marks, generation, blocks))
        elif order == "reset":
            self.walk.reset()
            self.spared.clear()
        else:
            raise ValueError("unknown order")

    def limit(self, window_bytes: int) -> None:
        """Limit what is read ahead to this, and to what was asked for."""
        self.walk.resize(min(window_bytes, self._asked))

    def close(self) -> None:
        """Release the rank; its leases end."""
        if self._crew is not None:
            self._crew.leave(self.number)
        self.channel.close()
        self.tier.arena.release(_ALL)  # now: what is on its way to its room keeps the arena open
        self.tier.close()


class Pauses:
    """How long to wait between two looks at what was served: less than workers take to serve more.

    Workers do not say so. Always short, pauses would take processor time from slow trainings;
    always long, a fast training would wait for a window that could move. Where something else holds
    reads back, what arrives ends the pause.
    """

    def __init__(self) -> None:
        self.seconds = _BUSY
        """Until the next look."""
        self._moved = -math.inf
        self._interval = _IDLE * _LOOKS

    def looked(self, has_moved: bool, now: float, is_held_back: bool = False) -> None:
        """Note whether the window could move on, and whether something else held reads back."""
        if has_moved:
            self._interval, self._moved = now - self._moved, now
        waited = max(self._interval, now - self._moved)
        self.seconds = _IDLE if is_held_back else min(_IDLE, max(_BUSY, waited / _LOOKS))


class Fleet:
    """Sees to it that as many processes read as make reading faster, or as were asked for."""

    def __init__(self, job: Job) -> None:
        self._asked = job.fetchers
        most = job.fetchers or most_fetchers(job.source, job.pool is not None)
        self._headcount = Headcount(most)
        self.crew: Crew[Rank] | None = Crew(job) if most > 1 else None
        self._since, self._bytes, self._cpu = time.monotonic(), 0, 0.0

    def attend(self, fetcher: Fetcher[Rank]) -> None:
        """Look after it; to be called often."""
        now = time.monotonic()
        if self.crew is None or now - self._since < _INTERVAL:
            return
        read, cpu = fetcher.read_bytes, time.process_time() + self.crew.cpu_seconds
        seconds = now - self._since
        self._headcount.measured(
            (read - self._bytes) / seconds, (cpu - self._cpu) / seconds, fetcher.is_held_back
        )
        self._since, self._bytes, self._cpu = now, read, cpu
        self.crew.resize((self._asked or self._headcount.wanted) - 1)


def serve(job: Job, listener: socket.socket) -> None:
    """Prefetch for the ranks that connect, until there have been none for a while."""
    # Open the storage before anything is claimed, or the workers would wait for that.
    with contextlib.suppress(StokerError, OSError):
        job.source.read_packed(np.empty(0, np.uint32))
    fleet = Fleet(job)
    fetcher = Fetcher(job.source, pool=job.pool, crew=fleet.crew)
    room, look_at = 0, -math.inf
    ranks = Members(listener, lambda channel: Rank(channel, job, fleet.crew), fetcher.fileno())
    pauses = Pauses()
    is_settled = False
    while not ranks.are_gone:
        if ranks.attend(pauses.seconds):
            is_settled = False
        if ranks.all:
            fleet.attend(fetcher)
        if ranks.all and (now := time.monotonic()) >= look_at:
            # It moves where caches lend each other memory.
            before, look_at = room, now + _LOOK
            room = int(job.tier.arena.stats()["regions"][WINDOW]["budget"])
            is_settled = is_settled and room == before
        if ranks.all and not is_settled:
            is_settled = _divide(room, ranks.all)
        try:
            has_moved = fetcher.step(ranks.all)
        except (StokerError, OSError) as error:
            log.info("the cache is not available: %s", error)
            has_moved = False
        pauses.looked(has_moved, time.monotonic(), fetcher.is_held_back)
    fetcher.close()
    if job.pool is not None:
        job.pool.close()  # with what waits to be written


def _divide(room: int, ranks: list[Rank]) -> bool:
    """Give each rank its share of the region; False while one holds more than that.

    The region was made for the ranks of one job, and what does not fit would be read for nothing.
    """
    share = room // len(ranks)
    over = sum(max(0, rank.walk.held - share) for rank in ranks)
    for rank in ranks:
        rank.limit(max(0, share - over))
    return over == 0


def main() -> None:
    """Be the process."""
    serve_clients_here()
    keep_freed_memory()
    run(serve)
