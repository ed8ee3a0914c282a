"""Standing aside: workers read past the cache while the samples lie in memory anyway."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stoker.source.base import Source

_LOOKED_AT = 32  # samples
_ENOUGH, _TOO_FEW = 0.75, 0.5  # share of them in memory: to stand aside, and to stop doing so
_INTERVAL = 0.5  # seconds between two looks within an epoch

log = logging.getLogger("stoker")


class DirectReading:
    """Says which batches workers read past the cache, as a copy would only cost them time.

    Looks where samples of the coming epoch lie as it begins, and again while it is requested: once
    they do not lie in memory, the rest of the epoch goes through the cache. Ranks need not agree,
    as each sample is served once in any case. One thread at a time.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        """Whether batches are read past the cache now."""
        self.samples = 0
        """Samples requested so."""
        self._source, self._clock = source, clock
        self._looked = 0.0

    def begin(self, ids: NDArray[np.uint32]) -> bool:
        """Decide for an epoch of samples ``u32[n]``; return :attr:`is_on`."""
        before, self.is_on = self.is_on, self._share(ids) >= _ENOUGH
        if self.is_on and not before:
            log.info("samples lie in the page cache: workers read them past the cache")
        return self.is_on

    def takes(self, ids: NDArray[np.uint32]) -> bool:
        """Whether a batch ``u32[n]`` that is requested now is read past the cache."""
        if self.is_on and self._clock() - self._looked > _INTERVAL:
            self.is_on = self._share(ids) >= _TOO_FEW
            if not self.is_on:
                log.info("samples are not in the page cache any more: the cache is used")
        self.samples += len(ids) if self.is_on else 0
        return self.is_on

    def _share(self, ids: NDArray[np.uint32]) -> float:
        """Return the share of samples in memory, by some that are spread over ``ids``."""
        some = np.linspace(0, len(ids) - 1, min(len(ids), _LOOKED_AT)).astype(np.int64)
        share = self._source.at_hand(ids[some])
        self._looked = self._clock()
        return share
