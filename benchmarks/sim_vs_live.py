"""Every recipe, simulated and live: hits of real Loaders with prefetch and workers.

Each row is one training: two workers, prefetch, a source of more or fewer requests a second than
training takes (`stoker.testing.SlowSource`) and a step that sleeps for its length; then the same
recipe, sizes, losses and seed through `stoker.sim.replay`, with and without read-ahead. Recipes
that score by embeddings have the neighbours that the simulator makes up, live too. Substitutes
count apart from hits. With --output FILE each row is written there when it is done, and a run that
was interrupted resumes after the last one.

    python benchmarks/sim_vs_live.py --output sim_vs_live.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import stoker
from stoker import recipes
from stoker.epoch.read_ahead import window_bytes
from stoker.sim import Conditions, SimResult, replay
from stoker.sim.signals import with_made_up_graph
from stoker.source.held import MemorySource
from stoker.testing import SlowSource
from stoker.types import parse_bytes

MORE = (
    "foresight:repeat=4",
    "foresight:importance=true",
    "foresight:prune=0.5",
    "shade:repetition=2",
)
BATCH, WORKERS, SHARE, EPOCHS = 32, 2, 0.2, 6
RATE, LATENCY = 1500.0, 0.002
"""Samples a second of training; seconds of a request."""
STORAGES = {"ample": 4000.0, "scarce": 600.0}
"""Requests a second: more than training takes, so that the window is full, or fewer than it
misses."""
FEW, MANY = 800, 3000


def main() -> None:
    """Print a row for each recipe, and the largest distance."""
    parser = harness.parser(__doc__)
    parser.add_argument("--recipes", help="texts with commas; default: all")
    parser.add_argument("--storages", default=",".join(STORAGES), help="names with commas")
    parser.add_argument("--output", type=Path, help="file of the rows done, to resume from")
    args = parser.parse_args()
    names = args.recipes.split(",") if args.recipes else [*recipes.names(), *MORE]
    if args.smoke and not args.recipes:
        names = ["lru", "foresight"]
    rows: dict[str, dict[str, Any]] = {}
    if args.output is not None and args.output.exists():
        rows = json.loads(args.output.read_text())
    report = harness.Report("Simulated and live, with prefetch and two workers", args.smoke)
    count, epochs = (FEW, 3) if args.smoke else (MANY, EPOCHS)
    for storage in args.storages.split(","):
        for name in names:
            key = f"{name} on {storage}"
            if key not in rows:
                rows[key] = row_of(name, STORAGES[storage], count, epochs)
                if args.output is not None:
                    args.output.write_text(json.dumps(rows, indent=1))
            report.row(recipe=name, storage=storage, **rows[key])
            report.target(f"{key}, points of hits", 100 * abs(rows[key]["distance"]), 1)
    harness.show(args, report)


def row_of(name: str, iops: float, count: int, epochs: int) -> dict[str, Any]:
    """Train and replay with this recipe; return the cells of its row."""
    recipe = with_made_up_graph(recipes.get(name))
    sizes = np.random.default_rng(0).integers(2_000, 10_000, count)
    losses = np.random.default_rng(1).lognormal(0, 1, count)
    live, seconds = trained(recipe, sizes, losses, epochs, iops)
    plain = replayed(recipe, sizes, losses, epochs, iops, 0)
    ahead = replayed(recipe, sizes, losses, epochs, iops, window_of(sizes))
    others = live.substituted + live.packaged
    return {
        "live": live.hits / live.accesses,
        "simulated": ahead.hit_ratio,
        "distance": ahead.hit_ratio - live.hits / live.accesses,
        "without_read_ahead": plain.hit_ratio,
        "live_others": others / live.accesses,
        "simulated_others": ahead.substituted_ratio + ahead.packaged_ratio,
        "live_s": sum(seconds[1:]) / (epochs - 1),
        "simulated_s": ahead.after(1).seconds / (epochs - 1),
    }


def trained(
    recipe: recipes.Recipe, sizes: np.ndarray, losses: np.ndarray, epochs: int, iops: float
) -> tuple[stoker.Stats, list[float]]:
    """Train behind the storage; return what was counted, and the seconds of each epoch."""
    samples = MemorySource(
        [sample.to_bytes(4, "little") + bytes(int(size) - 4) for sample, size in enumerate(sizes)]
    )
    source = SlowSource(samples, latency=LATENCY, iops=iops, concurrency=64)

    def rescore(batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(losses[batch.numpy()])

    loader = stoker.Loader(
        stoker.SampleDataset(source, decode=id_of),
        batch_size=BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        cache=stoker.Cache(f"{SHARE:.0%}", stands_aside=False),
        recipe=recipe,
        epochs=epochs,
        return_meta=True,
        rescore=rescore if recipe.scorer(len(sizes)).rescores else None,
    )
    seconds = []
    with loader:
        for _ in range(epochs):
            begin = due = time.perf_counter()
            right = []
            for _, meta in loader:
                _ = loader.weights  # read, or plans become uniform
                right.append(np.exp(-losses[meta.ids]))
                # To when the step would be over, as sleeps are late by a little.
                due = max(due, time.perf_counter()) + len(meta) / RATE
                loader.observe(torch.as_tensor(losses[meta.ids]), meta=meta)
                time.sleep(max(0.0, due - time.perf_counter()))
            seconds.append(time.perf_counter() - begin)
            loader.end_epoch(float(np.concatenate(right).mean()))
        return loader.stats, seconds


def id_of(data: memoryview) -> int:
    """Return which sample this is."""
    return int.from_bytes(data[:4], "little")


def window_of(sizes: np.ndarray) -> int:
    """Return the bytes that the Loader reads ahead."""
    asked = parse_bytes(stoker.Cache().prefetch, name="prefetch")
    return window_bytes(asked, round(SHARE * sizes.sum()), BATCH * sizes.mean(), WORKERS, 1)


def replayed(
    recipe: recipes.Recipe,
    sizes: np.ndarray,
    losses: np.ndarray,
    epochs: int,
    iops: float,
    ahead: int,
) -> SimResult:
    """Replay the same, reading so many bytes ahead."""
    given = Conditions(
        compute_rate=RATE, latency=LATENCY, iops=iops, concurrency=64, workers=WORKERS,
        window_bytes=float(window_of(sizes)),
    )  # fmt: skip
    return replay(
        recipe,
        len(sizes),
        epochs,
        SHARE,
        sizes,
        losses,
        batch_size=BATCH,
        conditions=given,
        read_ahead=ahead,
    )


if __name__ == "__main__":
    main()
