"""What the inner torch loader hands to its workers: one Request per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Request
from stoker.epoch.planner import BatchSpec

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
