"""Samples whose every word is their number, on slow storage, for tests of tiers below memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.pytorch import Loader, SampleDataset
from stoker.source.held import MemorySource
from stoker.testing.sources import SlowSource

NUM = 400
SAMPLES = [np.full(100 + i % 50, i, np.int32).tobytes() for i in range(NUM)]


def number_of(data: Any) -> int:
    values = np.frombuffer(data, np.int32)
    assert (values == values[0]).all()
    return int(values[0])


def slow_dataset(samples: list[bytes] = SAMPLES) -> SampleDataset:
    return SampleDataset(SlowSource(MemorySource(samples), latency=0.001), number_of)


def reads_of(dataset: SampleDataset) -> int:
    return int(dataset.source.reads.sum())  # type: ignore[attr-defined]


def epoch(loader: Loader) -> list[int]:
    return sorted(int(number) for batch in loader for number in batch)
