"""Time of epochs as the simulator computes it, beside what a real Loader takes.

The storage is `stoker.testing.SlowSource` (latency with a tail, requests and bytes a second), and
a step of training is a sleep of its length. What the Loader and the loop cost by themselves on this
machine, at the start of an epoch and for each batch, is measured once, with everything cached, and
given to the simulator for all rows. The same losses go to both. Samples are files of ``--data``, a
folder of class folders; without it, they have random lengths.

    python benchmarks/virtual_time.py --data CIFAR10/train
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import torch
from feed_posix import choose

import stoker
from stoker import recipes
from stoker.sim import Conditions, replay
from stoker.source.held import MemorySource
from stoker.testing import SlowSource

RECIPES = {
    "lru": {},
    "minio": {},
    "belady": {},
    "shade": {"repetition": 2.0},
    "quiver": {},
    "foresight": {"repeat": 2, "annealed": 0.3},
}
STORAGES = {
    "storage-bound": {"iops": 1500.0, "bandwidth": 1e9},
    "about even": {"iops": 3200.0, "bandwidth": 1e9},
    "bytes-bound": {"iops": 20_000.0, "samples_per_second": 2000.0},
}
RATE, LATENCY, TAIL, BATCH, WORKERS, SHARE = 2500.0, 0.004, 0.5, 64, 2, 0.2


class Run(NamedTuple):
    """A training with a real Loader, by epoch."""

    seconds: list[float]
    firsts: list[float]
    """Until the first batch."""
    stalls: list[float]
    hit_ratio: float


def trained(
    name: str, storage: dict[str, float], samples: list[bytes], losses: np.ndarray, epochs: int
) -> Run:
    """Train behind this storage."""
    source = SlowSource(
        MemorySource(samples), latency=LATENCY, tail=TAIL, concurrency=64, **storage
    )
    loader = stoker.Loader(
        stoker.SampleDataset(source, decode=len),
        batch_size=BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        cache=f"{SHARE:.0%}",
        recipe=getattr(recipes, name)(**RECIPES.get(name, {})),
        epochs=epochs,
        return_meta=True,
    )
    seconds, firsts = [], []
    with loader:
        for _ in range(epochs):
            begin = time.perf_counter()
            due, is_first = begin, True
            for _, meta in loader:
                if is_first:
                    firsts.append(time.perf_counter() - begin)
                    is_first = False
                # To when the step would be over, as sleeps are late by a little.
                due = max(due, time.perf_counter()) + len(meta) / RATE
                loader.observe(torch.as_tensor(losses[meta.ids]), meta=meta)
                time.sleep(max(0.0, due - time.perf_counter()))
            seconds.append(time.perf_counter() - begin)
        loader.end_epoch()
        stalls = [stats.stall_seconds for stats in loader.epoch_stats]
        return Run(seconds, firsts, stalls, loader.stats.hit_ratio)


def own_cost(samples: list[bytes], losses: np.ndarray, epochs: int) -> tuple[float, float]:
    """Return seconds at the start of an epoch and for each batch, where everything is cached."""
    run = trained("oracle", {}, samples, losses, epochs)
    start = statistics.median(run.firsts[1:])
    rest = statistics.median(run.seconds[1:]) - start - len(samples) / RATE
    return start, max(0.0, rest / -(-len(samples) // BATCH))


def samples_of(root: Path | None, count: int) -> list[bytes]:
    """Return the bytes of so many files, from all classes alike, or of nothing in particular."""
    if root is None:
        sizes = np.random.default_rng(0).integers(2_000, 10_000, count)
        return [bytes(int(size)) for size in sizes]
    return [Path(path).read_bytes() for path in choose(root, count).paths]


def main() -> None:
    """Print the table of all recipes on all storages."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of class folders of images")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names with commas")
    parser.add_argument("--storages", default=",".join(STORAGES), help="names with commas")
    args = parser.parse_args()
    count, epochs = (600, 2) if args.smoke else (4000, 4)
    if args.smoke:
        args.recipes, args.storages = "lru,shade", "storage-bound"
    samples = samples_of(args.data, count)
    sizes = np.array([len(sample) for sample in samples])
    losses = np.random.default_rng(1).lognormal(0, 1, count)
    report = harness.Report("Virtual time against real Loaders", args.smoke)
    worst = []
    start, each = own_cost(samples, losses, epochs)
    report.remarks.append(f"with everything cached: {start:.3f} s to begin, {each:.5f} s a batch")
    for kind in args.storages.split(","):
        storage = dict(STORAGES[kind])
        if "samples_per_second" in storage:
            storage["bandwidth"] = storage.pop("samples_per_second") * float(sizes.mean())
        window = max(0.05 * SHARE * sizes.sum(), min(6 * BATCH * sizes.mean(), sizes.sum() / 20))
        given = Conditions(
            compute_rate=RATE,
            latency=LATENCY,
            tail=TAIL,
            concurrency=256,
            window_bytes=float(window),
            workers=WORKERS,
            start_seconds=start,
            batch_seconds=each,
            **storage,
        )
        for name in args.recipes.split(","):
            seconds, _, stalls, hits = trained(name, storage, samples, losses, epochs)
            found = replay(
                getattr(recipes, name)(**RECIPES[name]), count, epochs, SHARE, sizes=sizes,
                losses=losses, batch_size=BATCH, conditions=given, read_ahead=int(window),
            )  # fmt: skip
            later = found.after(1)
            ratio = later.seconds / sum(seconds[1:])
            worst.append(abs(ratio - 1))
            report.row(
                storage=kind,
                recipe=name,
                real_s=sum(seconds[1:]) / (epochs - 1),
                simulated_s=later.seconds / (epochs - 1),
                ratio=ratio,
                real_stall_s=sum(stalls[1:]) / (epochs - 1),
                simulated_stall_s=later.stall_seconds / (epochs - 1),
                first_real_s=seconds[0],
                first_simulated_s=found.per_epoch[0].time.seconds,
                real_hits=hits,
                simulated_hits=found.hit_ratio,
            )
    report.target("largest difference of an epoch's time from the second on", max(worst), 0.05)
    harness.show(args, report)


if __name__ == "__main__":
    main()
