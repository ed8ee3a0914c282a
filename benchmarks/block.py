"""Blocks of adjacent samples against uniform epochs: how far neighbours are apart, and accuracy.

With ``--plans`` the table is of plans alone: 1.28 million samples in blocks of 32, and one by one.
Otherwise the same network is trained from the same start for each seed, on images that were
shuffled once, as ``stoker pack`` leaves them, and on images sorted by class, as CorgiPile's authors
do. What counts is the difference to the uniform training of the same seed, on all images that were
not trained on. Training is live, through the Loader with a cache of 20 %. Resumes where it was
stopped, and may run several times at once, one call a processor.

The default (a small network, 10,000 images, 12 epochs, 4 seeds) takes a quarter of an hour of one
processor.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Report, show
from importance_data import Images
from importance_train import Settings, train
from tasks import Task, parser
from trainings import train_and_show

from stoker import recipes
from stoker.plan import Plan
from stoker.sampler import BlockSampler, UniformSampler, neighbour_distances
from stoker.source.held import MemorySource

CACHE, BLOCK, BATCH = 0.2, 32, 256
WINDOWS = (0.05, 0.1, 0.2, 0.4)
"""Of an epoch, and so the caches that these are chosen for."""


class Case(NamedTuple):
    """One way to train."""

    block: int
    window: float | None
    is_sorted: bool
    """Whether the images of a class lie together; else they are in random order."""


UNIFORM = "uniform"
CASES = {
    UNIFORM: Case(1, None, False),
    "block=32, packed": Case(BLOCK, None, False),
    "block=32, sorted by class": Case(BLOCK, None, True),
    "block=32:window=0.05, sorted by class": Case(BLOCK, 0.05, True),
}


def distances(smoke: bool) -> Report:
    """Return the table of how far neighbours are apart in a plan."""
    count = 20_000 if smoke else 1_280_000
    table = Report(f"Plans of {count:,} samples (simulated: no bytes are read)", smoke)
    plans = {UNIFORM: UniformSampler(count, 1).plan(None, 0)}
    for window in WINDOWS:
        sampler = BlockSampler(count, 1, block=BLOCK, window=window)
        plans[f"block={BLOCK}:window={window}"] = sampler.plan(None, 0)
    for name, plan in plans.items():
        apart = neighbour_distances(plan.ids)
        fifth, half, most = np.percentile(apart, (5, 50, 95))
        table.row(
            plan=name,
            apart_5=int(fifth),
            apart_50=int(half),
            apart_95=int(most),
            least=int(apart.min()),
            mean_of_epoch=f"{100 * apart.mean() / count:.1f} %",
            held=f"{100 * held(plan):.1f} %",
            alike=round(alike(plan), 2),
            requests=f"1/{count / requests(plan):.3g}",
        )
    table.remarks = [
        "apart_5, apart_50, apart_95: quantiles of the accesses between sample i and i + 1, "
        "and the least of them. held: most samples read and not yet due, of all samples. alike: "
        f"pairs of {BLOCK} adjacent samples in a batch of {BATCH}, in the mean. requests: for each "
        "sample, if nothing was cached before.",
    ]
    return table


def blocks_of(plan: Plan) -> np.ndarray:
    """Return [A], the block of each access, each sample its own where there are none."""
    return np.asarray(plan.ids if plan.blocks is None else plan.blocks)


def held(plan: Plan) -> float:
    """Return the largest share of samples that are read with their block and not yet due."""
    _, opened, sizes = np.unique(blocks_of(plan), return_index=True, return_counts=True)
    read = np.bincount(opened, weights=sizes, minlength=len(plan)).cumsum()
    return float((read - np.arange(1, len(plan) + 1)).max()) / len(plan)


def alike(plan: Plan) -> float:
    """Return how many pairs of one block, or of what would be one, a batch has in the mean."""
    batches = plan.ids[: len(plan) // BATCH * BATCH].reshape(-1, BATCH) // BLOCK
    pairs = 0
    for batch in batches:
        _, counts = np.unique(batch, return_counts=True)
        pairs += int((counts * (counts - 1) // 2).sum())
    return pairs / len(batches)


def requests(plan: Plan) -> int:
    """Return how many requests read the epoch."""
    return len(np.unique(blocks_of(plan)))


def tasks(images: Images, settings: Settings, folder: Path, seeds: int) -> list[Task]:
    """Return all trainings, seed after seed."""
    order = np.random.default_rng(0).permutation(len(images))
    source = MemorySource(images.source.read(order))
    packed = replace(images, source=source, targets=images.targets[order])
    return [
        _training(images if case.is_sorted else packed, settings, folder, name, seed)
        for seed in range(seeds)
        for name, case in CASES.items()
    ]


def _training(images: Images, settings: Settings, folder: Path, name: str, seed: int) -> Task:
    def run() -> dict[str, Any]:
        case = CASES[name]
        block = min(case.block, len(images) // 20)  # as a smoke test needs it
        recipe = recipes.foresight(block=block, window=case.window)
        found, _ = train(images, recipe, CACHE, seed, 0.0, settings)
        return found | {"case": name, "seed": seed}

    return Task(folder / f"{list(CASES).index(name)}-{seed}.json", (), run)


def report(folder: Path, about: str, smoke: bool) -> Report:
    """Return the table of what has been trained."""
    table = Report(f"Accuracy with blocks, % of held-out images ({about})", smoke)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    uniform = {one["seed"]: one["accuracy"] for one in found if one["case"] == UNIFORM}
    for name in CASES:
        ones = [one for one in found if one["case"] == name and one["seed"] in uniform]
        if not ones:
            continue
        paired = [100 * (one["accuracy"] - uniform[one["seed"]]) for one in ones]
        spread = statistics.stdev(paired) if len(paired) > 1 else math.nan
        table.row(
            training=name,
            accuracy=round(100 * statistics.fmean(one["accuracy"] for one in ones), 2),
            to_uniform=round(statistics.fmean(paired), 2),
            error=round(spread / math.sqrt(len(paired)), 2),
            worst_class=round(100 * statistics.fmean(one["worst_class"] for one in ones), 1),
            seeds=len(ones),
        )
    table.remarks = [
        "measured. to_uniform: mean over seeds of the difference to the uniform training of the "
        "same seed, error its standard error. Windows are a fifth of an epoch, as the cache is, "
        "if none is given.",
    ]
    return table


def main() -> None:
    """Parse the arguments; show the plans, or train what is missing and print the table."""
    result = parser(
        __doc__, samples=10_000, test_samples=10_000, epochs=12, seeds=4, output="block-output"
    )
    result.add_argument("--threads", type=int, default=1, help="of torch: free processors")
    result.add_argument("--plans", action="store_true", help="only show what plans are like")
    args = result.parse_args()
    if args.plans:
        show(args, distances(args.smoke), part="plans")
    else:
        train_and_show(args, "small", tasks, report)


if __name__ == "__main__":
    main()
