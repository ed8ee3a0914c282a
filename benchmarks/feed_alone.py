"""The fetcher alone in a process, on a plan whose samples are served as soon as they are there."""

from __future__ import annotations

import resource
import select
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.policy.base import Region
from stoker.prefetch.fetcher import Fetcher
from stoker.prefetch.walk import SERVED, Group, Marks, Segment, Walk
from stoker.source.base import Source
from stoker.source.remote.client import serve_clients_here
from stoker.store.arena import Arena
from stoker.store.flight import Meter
from stoker.store.memory_tier import MemoryTier
from stoker.store.substitutes import ByNeighbour

_WINDOW = 32 << 20


class Rank:
    """One rank's share of the fetcher, for one epoch in a random order."""

    def __init__(self, source: Source, arena: Arena) -> None:
        count = len(source)
        self.number = 0
        self.marks = Marks(np.zeros(Marks.bytes(count), np.uint8))
        self.marks.begin(0.0)
        self.tier = MemoryTier(Arena.attach(arena.handle))
        self.ids = np.random.default_rng(1).permutation(count).astype(np.uint32)
        self.walk = Walk(source.sizes, _WINDOW)
        self.walk.add(Segment(0, self.ids, None, self.marks, 1))
        self.fresh = np.zeros(count, np.uint8)
        self.meter = Meter(np.zeros(2))
        self.ready: deque[Group] = deque()
        self.spared: deque[Group] = deque()
        self.stand_ins: ByNeighbour | None = None


def alone(
    open_source: Callable[[], Source], bare: Callable[[], dict[str, Any]], rounds: int
) -> dict[str, Any]:
    """Return the processor seconds of ``rounds`` epochs by the fetcher, and by ``bare`` in turn."""
    serve_clients_here()
    source = open_source()
    mean = int(source.sizes.mean())
    seconds: dict[str, list[float]] = {"bare": [], "fetcher": []}
    with Arena(len(source), _WINDOW + (16 << 20), mean) as arena:
        rules = [("main", 0.25, "while_room"), ("window", 0.75, "always")]
        arena.configure(
            [Region(name, share, order="insertion", admission=how) for name, share, how in rules]
        )
        for number in range(rounds + 1):
            by_fetcher, by_bare = _epoch(source, arena), float(bare()["fetch_s"][0])
            if number:
                seconds["fetcher"].append(by_fetcher)
                seconds["bare"].append(by_bare)
    return seconds


def _epoch(source: Source, arena: Arena) -> float:
    """Have every object fetched; return the processor seconds that took."""
    arena.discard(np.arange(len(source), dtype=np.uint32))
    rank = Rank(source, arena)
    fetcher: Fetcher[Rank] = Fetcher(source)
    poll = select.poll()
    poll.register(fetcher.fileno(), select.POLLIN)
    low = 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    while low < len(source):
        fetcher.step([rank])
        there = arena.contains(rank.ids[low : max(low, min(low + 512, rank.marks.handed_out))])
        length = len(there) if there.all() else int(np.argmin(there))
        rank.marks.served[low : low + length] = SERVED
        low += length
        poll.poll(5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    fetcher.close()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
