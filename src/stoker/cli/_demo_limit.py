"""The least time that an epoch can take on this machine with this storage and this cache.

Where training and decoding share processors, an epoch of A accesses takes at least

    T = max(m A / X_storage,  A compute,  A (compute_cpu + decode_cpu) / cores)

with m the miss ratio, X_storage = min(IOPS, concurrency / latency) in samples a second, compute the
wall time and compute_cpu, decode_cpu the processor time of one sample. No policy and no order in
which each sample is visited once an epoch has a miss ratio below 1 - c, with c the cached share of
the data: every reuse crosses one epoch boundary, and at most the cache survives it.

Times are those of the quick steps of the training itself and of the quickest decoding, since
whatever else runs on the machine only ever adds to them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from stoker.cli._demo_data import DemoData, Settings, Storage
from stoker.cli._demo_training import Run

_REPEATS = 3


@dataclass(frozen=True)
class EpochLimit:
    """The three lower bounds on the seconds of an epoch."""

    storage: float
    """Fetching what a cache of this size must miss."""
    compute: float
    """Training alone."""
    processors: float
    """Training and decoding, spread perfectly over all processors."""

    @property
    def seconds(self) -> float:
        """The largest of the three."""
        return max(self.storage, self.compute, self.processors)

    @property
    def bound_by(self) -> str:
        """Which of them it is."""
        bounds = {
            "storage": self.storage,
            "training": self.compute,
            "the processors": self.processors,
        }
        return max(bounds, key=lambda name: bounds[name])


def measure_limit(
    data: DemoData, storage: Storage, settings: Settings, runs: list[Run]
) -> EpochLimit:
    """Return the limit of an epoch from the quickest training steps and a measure of decoding."""
    accesses, cores = len(data.paths), len(os.sched_getaffinity(0))
    wall = min(run.step.wall for run in runs)
    processor = min(run.step.processor for run in runs) + _decode_seconds(data)
    delivered = storage.samples_per_second(max(1, settings.workers))
    return EpochLimit(
        storage=(1 - settings.share_of(data)) * accesses / delivered,
        compute=accesses * wall,
        processors=accesses * processor / cores,
    )


def _decode_seconds(data: DemoData) -> float:
    """Return processor seconds to decode and transform one sample that is in memory."""
    times = []
    dataset = data.dataset(data.files())
    ids = np.random.default_rng(0).permutation(len(dataset))[:256]
    raw = [memoryview(sample) for sample in dataset.source.read(ids)]
    for _ in range(_REPEATS):
        started = time.process_time()
        for index, sample in zip(ids.tolist(), raw, strict=True):
            dataset.finish(index, dataset.decode(sample))
        times.append((time.process_time() - started) / len(raw))
    return min(times)
