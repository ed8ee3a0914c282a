"""Slow storage that sees when a sample is read twice at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.shared import SharedArray
from stoker.source.base import PackedRead, Source
from stoker.testing.sources import SlowSource


class WatchedSource(SlowSource):
    """A SlowSource for the Loader, which reads packed; the notes are shared by all processes."""

    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(source, **how)
        self._busy = SharedArray.create(len(source), np.uint8, "busy")
        self._twice = SharedArray.create(len(source), np.uint8, "twice")

    @property
    def read_twice_at_once(self) -> list[int]:
        """The samples that two readers were reading at the same time."""
        return np.flatnonzero(self._twice.array).tolist()

    def read_packed(self, ids: npt.ArrayLike) -> PackedRead:
        with self._watched(np.asarray(ids)):
            return super().read_packed(ids)

    @contextmanager
    def _watched(self, ids: npt.NDArray[Any]) -> Iterator[None]:
        busy = self._busy.array
        self._twice.array[ids[busy[ids] == 1]] = 1
        busy[ids] = 1
        try:
            yield
        finally:
            busy[ids] = 0
