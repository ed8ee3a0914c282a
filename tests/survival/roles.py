"""What the processes of the survival tests do, round by round, until the board says stop."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from stoker.store.arena import Arena
from survival.board import Field, Row
from survival.payloads import NUM_IDS, packed, sample, wrong

_BATCH = 48  # at most 64, so that a call takes the lock once
_WAIT = 0.2


def _some(rng: np.random.Generator) -> NDArray[np.uint32]:
    """Return a batch of ids, low ones more often, so that there are hits and evictions."""
    return (rng.random(rng.integers(1, _BATCH)) ** 2 * NUM_IDS).astype(np.uint32)


def _rng() -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(os.urandom(8), "little"))


def _read(arena: Arena, row: Row, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
    with row.timed():
        got = arena.get_many(ids)
    row.add(Field.READ, int(got[2].sum()))
    row.add(Field.READ_BYTES, len(got[0]))
    if bad := wrong(ids, got):
        row.add(Field.WRONG, len(bad))
        raise AssertionError(f"wrong bytes for {bad}")
    return got[2]


def _put(arena: Arena, row: Row, ids: NDArray[np.uint32], *, as_list: bool) -> NDArray[np.bool_]:
    samples = [sample(id) for id in ids] if as_list else packed(ids)
    keys = ids.astype(np.float64)
    with row.timed():
        kept = arena.put_many(ids, samples, keys)
    row.add(Field.PUT, int(kept.sum()))
    return kept


def reader(arena: Arena, row: Row) -> None:
    """Reads and checks; leases what it reads now and then."""
    rng, position = _rng(), 0
    while not row.over:
        ids = _some(rng)
        _read(arena, row, ids)
        if rng.random() < 0.1:
            position += 1
            with row.timed():
                arena.lease(ids[:8], position)
            arena.release(position - 2)
        row.add(Field.BEATS)


def writer(arena: Arena, row: Row) -> None:
    """Puts, changes keys, drops."""
    rng = _rng()
    while not row.over:
        ids = _some(rng)
        _put(arena, row, ids, as_list=bool(rng.random() < 0.5))
        if rng.random() < 0.1:
            with row.timed():
                arena.set_keys(ids, rng.random(len(ids)))
        if rng.random() < 0.05:
            with row.timed():
                arena.discard(ids[:4])
        row.add(Field.BEATS)


def claimant(arena: Arena, row: Row) -> None:
    """Works like a store: gets, claims what is missing, puts it, waits for what others claimed."""
    rng = _rng()
    while not row.over:
        ids = np.unique(_some(rng))
        missing = ids[~_read(arena, row, ids)]
        with row.timed():
            own = arena.claim(missing)
        mine, others = missing[own], missing[~own]
        if rng.random() < 0.1:
            mine = mine[1:]  # a sample that could not be fetched
        _put(arena, row, mine, as_list=True)
        arena.abandon(missing[own])
        there = arena.wait(others, _WAIT)
        _read(arena, row, others[there])
        row.add(Field.BEATS)


def put_only(arena: Arena, row: Row) -> None:
    """Puts tiny samples and discards them as fast as it can: holds the lock much of the time.

    What is cached already is refused without the lock, hence the discarding.
    """
    rng = _rng()
    small = np.flatnonzero(np.fromiter((len(sample(i)) < 1500 for i in range(NUM_IDS)), bool))
    data = {int(id): sample(id).tobytes() for id in small}
    while not row.over:
        ids = rng.choice(small, 64).astype(np.uint32)
        samples = [data[int(id)] for id in ids]
        with row.timed():
            arena.put_many(ids, samples)
            arena.discard(ids)
        row.add(Field.BEATS)
