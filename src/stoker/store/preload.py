"""Brings samples into a cache before the first of them is asked for."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from stoker.errors import SourceUnavailable
from stoker.source.base import Source
from stoker.store.served import Served
from stoker.store.store import Store
from stoker.store.tier import Ids, Pool, RegionTier
from stoker.types import format_bytes

log = logging.getLogger("stoker")

_BATCH = 64
_SAY_EVERY = 10.0  # seconds


def preload(
    source: Source, tier: RegionTier, ids: Ids, *, threads: int = 16, pool: Pool | None = None
) -> None:
    """Bring the samples ``ids`` into ``tier``, and say in the log how far it is.

    What is there is not read, what other processes are reading is waited for. Nothing of it counts
    as an access of the store that serves from ``tier`` later. ``threads`` batches are under way at
    once. A sample that is gone or damaged is left to who will ask for it.

    Raises :class:`~stoker.errors.SourceUnavailable` when the storage gives up.
    """
    begin = said = time.monotonic()
    # A store of its own, for its single flight and counters. Not closed: the tier is not its own.
    store = Store(source, tier, pool=pool)
    batches = [ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)]
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


def _refuse_outage(served: Served) -> None:
    for error in served.errors.values():
        if isinstance(error, SourceUnavailable):
            raise error
