"""What the inner torch loader hands to its workers: one Request per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from stoker.pytorch.meta import Request
from stoker.pytorch.planner import Draw

SPARES = 8
"""Replacements that travel with each batch: what the rank was given just before it."""


class RequestSampler:
    """A torch batch sampler whose batches are Requests."""

    def __init__(self) -> None:
        self._epoch: tuple[int, int, Callable[[], Iterator[Draw]], NDArray[np.uint32]] | None = None

    def begin(
        self,
        token: int,
        epoch: int,
        draws: Callable[[], Iterator[Draw]],
        given: NDArray[np.uint32],
    ) -> None:
        """Set the epoch that the next iterators walk, whose first batch is called ``token``.

        ``given`` are ids ``u32[n]`` that this rank got earlier in the epoch. torch asks for an
        iterator twice in a row at times and uses the second, so ``draws`` is called for the first
        batch and not before.
        """
        self._epoch = token, epoch, draws, given[-SPARES:]

    def __iter__(self) -> Iterator[Request]:
        assert self._epoch is not None, "begin() comes first"
        return self._requests(*self._epoch)

    def _requests(
        self,
        token: int,
        epoch: int,
        begin: Callable[[], Iterator[Draw]],
        given: NDArray[np.uint32],
    ) -> Iterator[Request]:
        draws = begin()
        ahead = list(islice(draws, 2))
        # The first batch of all has none before it, so the second stands in.
        spares = given if len(given) or not ahead else ahead[-1].ids[:SPARES]
        for number, draw in enumerate(chain(ahead, draws)):
            yield Request(
                token=token + number,
                epoch=epoch,
                ids=draw.ids,
                positions=draw.positions,
                weights=draw.weights,
                keys=draw.keys,
                spares=spares,
                first=draw.first,
                single=draw.single,
            )
            spares = given = np.concatenate([given, draw.ids])[-SPARES:]
