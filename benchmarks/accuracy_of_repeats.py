"""Does it cost accuracy that samples are visited R times in R epochs? Foresight against uniform.

Each seed trains the same network from the same start with each sample once an epoch, and with
``repeat`` 2 and 4; an ablation leaves out the annealed end. What counts is the difference to the
uniform training of the same seed, on all images that were not trained on: with 10,000 of them the
standard error of one difference would be half a point, by chance in the images alone. Resumes where
it was stopped, and may run several times at once, one call a processor. Training is live, through
the Loader with a cache of 20 %, so the hits are those of the accuracy beside them.

The default (ResNet-20, 10,000 images, 12 epochs, 12 seeds) takes two and a half hours of one
processor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from harness import Report
from importance_data import Images
from importance_model import MODELS
from importance_train import Settings, train
from tasks import Task, parser
from trainings import train_and_show

from stoker import recipes

CACHE = 0.2
ANNEALED = 0.125
CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "R = 2": {"repeat": 2},
    "R = 4": {"repeat": 4},
    "R = 4, no annealed end": {"repeat": 4, "annealed": 0.0},
}
MARGIN = 0.3
"""Points of accuracy that foresight may lose."""


def tasks(images: Images, settings: Settings, folder: Path, seeds: int) -> list[Task]:
    """Return all trainings, seed after seed, the ablation last."""
    *first, ablation = CASES
    order = [(seed, name) for seed in range(seeds) for name in first]
    order += [(seed, ablation) for seed in range(seeds)]
    return [_training(images, settings, folder, name, seed) for seed, name in order]


def _training(images: Images, settings: Settings, folder: Path, name: str, seed: int) -> Task:
    def run() -> dict[str, Any]:
        recipe = recipes.foresight(**CASES[name])
        found, _ = train(images, recipe, CACHE, seed, 0.0, settings)
        return found | {"case": name, "seed": seed}

    label = name.replace(" ", "").replace(",", "-").replace("=", "")
    return Task(folder / f"{label}-{seed}.json", (), run)


def report(folder: Path, about: str, smoke: bool) -> Report:
    """Return the table of what has been trained."""
    table = Report(f"Accuracy with repeats, % of held-out images ({about})", smoke)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    uniform = {one["seed"]: one["accuracy"] for one in found if one["case"] == "uniform"}
    for name in CASES:
        ones = [one for one in found if one["case"] == name and one["seed"] in uniform]
        if not ones:
            continue
        paired = [100 * (one["accuracy"] - uniform[one["seed"]]) for one in ones]
        error = statistics.stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
        # Epochs after the first, which fills the cache, and before the end that is annealed.
        mixed = [
            one["epochs"][1 : len(one["epochs"]) - math.ceil(ANNEALED * len(one["epochs"]))]
            for one in ones
        ]
        hits = [sum(e["hits"] for e in es) / sum(e["accesses"] for e in es) for es in mixed]
        table.row(
            training=name,
            accuracy=round(100 * statistics.fmean(one["accuracy"] for one in ones), 2),
            to_uniform=round(statistics.fmean(paired), 2),
            error=round(error, 2),
            spread=round(statistics.stdev(paired), 2) if len(paired) > 1 else None,
            worst_class=round(100 * statistics.fmean(one["worst_class"] for one in ones), 1),
            hits=round(100 * statistics.fmean(hits), 1),
            seeds=len(ones),
        )
        if name in ("R = 2", "R = 4"):
            table.target(
                f"{name}, points lost, upper end of the 95 % interval",
                -statistics.fmean(paired) + 1.96 * error,
                MARGIN,
            )
    table.remarks = [
        "to_uniform: mean over seeds of the difference to the uniform training of the same seed, "
        "error its standard error, spread the standard deviation of one difference. hits: live, "
        f"cache {CACHE:.0%}, after the first epoch and before the annealed end.",
    ]
    return table


def main() -> None:
    """Parse the arguments, train what is missing, print the table."""
    args = _parser().parse_args()
    train_and_show(args, args.model, tasks, report)


def _parser() -> argparse.ArgumentParser:
    result = parser(
        __doc__, samples=10_000, test_samples=10_000, epochs=12, seeds=12, output="repeats-output"
    )
    result.add_argument("--model", choices=MODELS, default="resnet20")
    result.add_argument("--threads", type=int, default=1, help="of torch: free processors")
    return result


if __name__ == "__main__":
    main()
