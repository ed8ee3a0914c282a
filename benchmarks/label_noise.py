"""What wrong labels do to importance: accuracy with 0, 20 and 40 % of them, beside uniform epochs.

Each seed trains the same small network from the same start with each recipe, through the Loader
with a cache of 20 %; the wrong labels are drawn once a seed. Held-out images, which are all that
were not trained on, keep their true labels. ``wrong`` is how often an epoch visits samples with a
wrong label, to how often uniform epochs do. Resumes where it was stopped, and may run several times
at once, one call a processor.

The default (5,000 images, 12 epochs, 3 seeds) takes half an hour of one processor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report
from importance_cases import fitted
from importance_data import Images
from importance_train import Settings, train
from tasks import Task, parser
from trainings import train_and_show

from stoker import recipes

CACHE = 0.2
FLIPPED = (0.0, 0.2, 0.4)
UNIFORM = "uniform"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    UNIFORM: ("minio", {}),
    "foresight, repeat 4": ("foresight", {"repeat": 4}),
    "foresight, importance": ("foresight", {"importance": True, "repeat": 4}),
    "foresight, prune": ("foresight", {"prune": 0.5}),
    "shade": ("shade", {}),
    "icache": ("icache", {"warm_up": 2}),
    "impact": ("impact", {"max_warm_up": 4}),
    "spidercache": ("spidercache", {}),
    "infobatch": ("infobatch", {}),
}
"""Names of recipes and their parameters; warm-ups are scaled to short trainings."""
LATE = 3
"""Epochs, the last ones before the annealed end, whose visits are counted."""


def tasks(images: Images, settings: Settings, folder: Path, seeds: int) -> list[Task]:
    """Return all trainings, seed after seed."""
    return [
        _training(images, settings, folder, name, flipped, seed)
        for seed in range(seeds)
        for flipped in FLIPPED
        for name in CASES
    ]


def _training(
    images: Images, settings: Settings, folder: Path, name: str, flipped: float, seed: int
) -> Task:
    def run() -> dict[str, Any]:
        recipe, params = CASES[name]
        fit = fitted(getattr(recipes, recipe)(**params), int(images.source.sizes.sum()))
        found, record = train(images, fit, CACHE, seed, flipped, settings)
        is_wrong = images.labels(flipped, seed) != images.targets
        end = settings.epochs - math.ceil(settings.epochs / 8)
        late = np.concatenate(record.visited[max(0, end - LATE) : end])
        wrong = is_wrong[late].mean() / is_wrong.mean() if is_wrong.any() else 1.0
        return found | {"case": name, "flipped": flipped, "seed": seed, "wrong": float(wrong)}

    label = name.replace(" ", "-").replace(",", "")
    return Task(folder / f"{label}-{flipped:g}-{seed}.json", (), run)


def report(folder: Path, about: str, smoke: bool) -> Report:
    """Return the table of what has been trained."""
    table = Report(f"Accuracy with wrong labels, % of held-out images ({about})", smoke)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    accuracy = {(one["case"], one["flipped"], one["seed"]): 100 * one["accuracy"] for one in found}
    for name in CASES:
        row: dict[str, Any] = {}
        for flipped in FLIPPED:
            seeds = sorted(
                seed
                for case, share, seed in accuracy
                if case == name and share == flipped and (UNIFORM, share, seed) in accuracy
            )
            if not seeds:
                continue
            ones = np.array([accuracy[name, flipped, seed] for seed in seeds])
            paired = ones - [accuracy[UNIFORM, flipped, seed] for seed in seeds]
            row[f"at_{flipped:.0%}"] = round(float(ones.mean()), 2)
            row[f"to_uniform_{flipped:.0%}"] = round(float(paired.mean()), 2)
            row[f"spread_{flipped:.0%}"] = round(float(np.ptp(paired)), 2)
        wrong = [one["wrong"] for one in found if one["case"] == name and one["flipped"]]
        if row:
            table.row(training=name, **row, wrong=round(float(np.mean(wrong or [1.0])), 2))
    table.remarks = [
        "to_uniform: mean over seeds of the difference to uniform epochs of the same seed; spread: "
        f"largest less smallest. wrong: visits to wrong labels in {LATE} late epochs, to their "
        "share of the samples.",
    ]
    return table


def main() -> None:
    """Parse the arguments, train what is missing, print the table."""
    arguments = parser(
        __doc__, samples=5_000, test_samples=10_000, epochs=12, seeds=3, output="noise-output"
    )
    arguments.add_argument("--threads", type=int, default=1, help="of torch: free processors")
    train_and_show(arguments.parse_args(), "small", tasks, report)


if __name__ == "__main__":
    main()
