"""What workers are asked for: one Request per batch, its random seeds, samples to rescore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Request
from stoker.epoch.planner import BatchSpec
from stoker.epoch.ranks import Ranks
from stoker.store.tier import Keys

_WORD = (1 << 64) - 1


def sample_seeds(seed: int, epoch: int, positions: NDArray[np.int64]) -> list[int]:
    """Return a 64-bit seed for each of ``positions``, ``i64[n]``, the places in the epoch's plan.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a counter, keyed by seed and epoch.
    """
    key = _mix(np.array([seed & _WORD, epoch & _WORD], np.uint64))
    base = key[0] ^ _mix(key[1:])[0]
    mixed: list[int] = _mix(
        base + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ).tolist()
    return mixed


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


SPARES = 8
"""Replacements that travel with each batch: what the rank was given just before it."""


class RequestSampler:
    """A torch batch sampler whose batches are Requests."""

    def __init__(self) -> None:
        self._epoch: _Epoch | None = None

    def begin(
        self,
        token: int,
        epoch: int,
        specs: Callable[[], Iterator[BatchSpec]],
        given: NDArray[np.uint32],
        *,
        stamp: int = 0,
        is_aside: bool = False,
        bare: int = 0,
    ) -> None:
        """Set the epoch that the next iterators walk, whose first batch is called ``token``.

        ``given`` are ids ``u32[n]`` that this rank got earlier in the epoch; ``stamp`` is what
        claims know it by; ``is_aside``: the
        batches are none of training's; the first ``bare`` are read past the cache. torch asks for
        an iterator twice in a row at times and uses the second, so ``specs`` is called for the
        first batch and not before.
        """
        self._epoch = _Epoch(token, epoch, specs, given[-SPARES:], stamp, is_aside, bare)

    def __iter__(self) -> Iterator[Request]:
        assert self._epoch is not None, "begin() comes first"
        return _requests(self._epoch)


class _Epoch(NamedTuple):
    token: int
    number: int
    specs: Callable[[], Iterator[BatchSpec]]
    given: NDArray[np.uint32]
    stamp: int
    is_aside: bool
    bare: int


def _requests(epoch: _Epoch) -> Iterator[Request]:
    specs, given = epoch.specs(), epoch.given
    ahead = list(islice(specs, 2))
    # The first batch of all has none before it, so the second stands in.
    spares = given if len(given) or not ahead else ahead[-1].ids[:SPARES]
    for number, spec in enumerate(chain(ahead, specs)):
        yield Request(
            token=epoch.token + number,
            epoch=epoch.number,
            ids=spec.ids,
            positions=spec.positions,
            weights=spec.weights,
            keys=spec.keys,
            spares=spares,
            first=spec.first,
            stamp=epoch.stamp,
            single=spec.single,
            is_aside=epoch.is_aside,
            is_bare=number < epoch.bare,
        )
        spares = given = np.concatenate([given, spec.ids])[-SPARES:]


def rescoring_specs(
    ids: NDArray[np.uint32],
    ranks: Ranks,
    batch_size: int | None,
    keys: Callable[[NDArray[np.uint32]], Keys],
) -> Iterator[BatchSpec]:
    """Yield the batches of one rank's part of ``ids`` ``u32[m]``.

    Parts are filled up to equal lengths, since the forward pass of a model that is wrapped for
    several ranks may talk to the others. Augmentation is that of the places ``ids``; ``keys`` are
    those of the cache policy.
    """
    size = batch_size or 1
    own = np.resize(ids, -(-len(ids) // ranks.world_size) * ranks.world_size)
    own = np.ascontiguousarray(own[ranks.rank :: ranks.world_size])
    for begin in range(0, len(own), size):
        part = own[begin : begin + size]
        places = part.astype(np.int64)
        yield BatchSpec(part, places, keys=keys(part), first=begin, single=batch_size is None)
