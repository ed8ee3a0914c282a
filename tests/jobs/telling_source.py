"""Apart from the tests, so that the prefetch process need not import what they do."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.testing.sources import SlowSource


class TellingSource(SlowSource):
    """Slow storage that tells how many samples it has given, to all processes."""

    def __init__(self, source: Source, rate: float) -> None:
        super().__init__(source, latency=0.0, iops=rate)
        self.given = SharedArray.create(1, np.int64)

    def read_packed(self, ids: Any) -> Any:
        packed = super().read_packed(ids)
        with self._meter.locked():
            self.given.array[0] += len(ids)
        return packed
