"""Fills a cache before the first access: an arena by ids, a tier by a list."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np

from stoker.errors import SourceError, SourceUnavailable
from stoker.source.base import Source, in_batches, read_whole
from stoker.source.packed import Packed, offsets_of, pick
from stoker.store.arena import Arena
from stoker.store.claims import Served
from stoker.store.store import Store
from stoker.store.tier import Ids, Pool, RegionTier
from stoker.types import format_bytes

_BATCH_BYTES = 4 << 20
_BATCH_SAMPLES = 256
log = logging.getLogger("stoker")
_BATCH = 64
_SAY_EVERY = 10.0  # seconds


@dataclass
class Filled:
    """What became of the samples to be cached."""

    wanted: int = 0
    """Samples that fit, and so should be cached."""
    present: int = 0
    """There before."""
    read: int = 0
    """Read from the source and kept."""
    refused: int = 0
    """Read but not kept: the arena has no room for them, or its disk failed."""
    busy: int = 0
    """Left to another process that was reading them."""
    bytes_read: int = 0
    """Bytes of those that were read, as they are kept."""
    failed: dict[int, SourceError] = field(default_factory=dict)
    """Samples that cannot be read, and why."""


def fill(
    source: Source,
    arena: Arena,
    *,
    threads: int = 16,
    progress: Callable[[int, int], None] = lambda samples, size: None,
) -> Filled:
    """Read the first samples of ``source`` into ``arena``, as many as fit.

    Cached samples are not read again. ``threads`` batches are read at once. ``progress`` is called
    in this thread with the samples and bytes done. A missing or damaged sample is
    recorded and skipped.

    Raises :class:`~stoker.errors.SourceUnavailable` when the storage gives up; what was read before
    stays, and another call resumes from there.
    """
    entrance = next(iter(arena.stats()["regions"]))
    sizes = source.sizes
    ids = np.flatnonzero(np.cumsum(sizes) <= arena.capacity_bytes).astype(np.uint32)
    filled = Filled(wanted=len(ids))

    def bring(batch: Ids) -> tuple[Ids, Filled]:
        return batch, _bring(source, arena, entrance, batch)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="stoker-fill")
    under_way: deque[Future[tuple[Ids, Filled]]] = deque()
    try:
        for batch in _batches(source, ids, _BATCH_SAMPLES):
            under_way.append(pool.submit(bring, batch))
            if len(under_way) >= 2 * threads:
                _note(filled, *under_way.popleft().result(), source, progress)
        while under_way:
            _note(filled, *under_way.popleft().result(), source, progress)
    finally:
        pool.shutdown(cancel_futures=True)
    return filled


def _bring(source: Source, arena: Arena, entrance: str, batch: Ids) -> Filled:
    """Bring one batch in."""
    there = arena.contains(batch)
    missing = batch[~there]
    own = arena.claim(missing)
    done = Filled(present=int(there.sum()), busy=int((~own).sum()))
    ids = missing[own]
    if not ids.size:
        return done
    try:
        data, offsets, errors = read_whole(source, ids)
        for error in errors.values():
            if isinstance(error, SourceUnavailable):
                raise error
        good = np.setdiff1d(np.arange(len(ids)), list(errors))
        kept = arena.put_many(ids[good], tuple(pick(Packed(data, offsets), good)), None, entrance)
        done.read, done.refused = int(kept.sum()), int((~kept).sum())
        done.bytes_read = int(offsets[-1])
        done.failed = {int(ids[row]): error for row, error in errors.items()}
    finally:
        arena.abandon(ids)  # those that were kept are not claimed any more
    return done


def _note(
    filled: Filled,
    batch: Ids,
    done: Filled,
    source: Source,
    progress: Callable[[int, int], None],
) -> None:
    for name in ("present", "read", "refused", "busy", "bytes_read"):
        setattr(filled, name, getattr(filled, name) + getattr(done, name))
    filled.failed.update(done.failed)
    progress(len(batch), int(source.sizes[batch].sum()))


def preload(
    source: Source, tier: RegionTier, ids: Ids, *, threads: int = 16, pool: Pool | None = None
) -> None:
    """Bring the samples ``ids`` into ``tier``, and say in the log how far it is.

    Cached samples are not read again; for samples that other processes are reading it waits. None
    of this counts as an access of the store that serves from ``tier`` later. ``threads`` batches
    are read at once. A missing or damaged sample is left to its first access.

    Raises :class:`~stoker.errors.SourceUnavailable` when the storage gives up.
    """
    begin = said = time.monotonic()
    # A store of its own, for its single flight and counters. Not closed: the tier is not its own.
    store = Store(source, tier, pool=pool)
    batches = list(_batches(source, ids, _BATCH))
    workers = ThreadPoolExecutor(threads, thread_name_prefix="stoker-preload")
    samples = num_bytes = 0
    try:
        for future in as_completed([workers.submit(store.serve, batch) for batch in batches]):
            served = future.result()
            _refuse_outage(served)
            samples, num_bytes = samples + len(served), num_bytes + int(served.offsets[-1])
            del served
            if time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                log.info("preloading: %d of %d, %s", samples, len(ids), format_bytes(num_bytes))
    finally:
        workers.shutdown(cancel_futures=True)
    took = time.monotonic() - begin
    log.info("preloaded %d samples, %s, in %.1f s", samples, format_bytes(num_bytes), took)


def _batches(source: Source, ids: Ids, most_samples: int) -> Iterator[Ids]:
    """Yield parts of ``ids``, ascending, to be read at once: so many at most, 4 MiB at most.

    Where a source says what is read at once, a page of rows, say, a part is as many of those as
    fit, and one that has more samples is not divided but by its bytes.
    """
    sizes, breaks = source.sizes[ids], source.breaks
    most = len(ids) if len(breaks) else most_samples
    ends = np.append(np.unique(np.searchsorted(ids, breaks)), len(ids))
    bounds, begin = offsets_of(sizes), 0
    while begin < len(ids):
        fits = np.searchsorted(bounds, bounds[begin] + _BATCH_BYTES, "right") - 1
        whole = ends[: np.searchsorted(ends, min(fits, begin + most_samples), "right")]
        end = int(whole[-1]) if len(whole) and whole[-1] > begin else int(ends[len(whole)])
        part = slice(begin, end)
        yield from in_batches(ids[part], sizes[part], most_bytes=_BATCH_BYTES, most_samples=most)
        begin = end


def _refuse_outage(served: Served) -> None:
    for error in served.errors.values():
        if isinstance(error, SourceUnavailable):
            raise error
