"""Claims of the trial, held against seeds that had no part in it, and partly in real time.

``--part virtual``: ``foresight:repeat=4`` was not the setting chosen beforehand in
``fair_trial.py``, but did best there. Here it is the choice, with the settings that the published
trial found in tuning, on twelve fresh seeds beside the strongest of each kind and its own controls.
``--part longer``: ``foresight:repeat=6`` trains 13 epochs in less time than others train 10; those
train 10 and 13, on twelve more; ``--part tuning`` is how that was chosen. ``--part live``: six
more seeds, with storage of 1,000 reads a second in real time, two workers and prefetch; nothing
else may run beside it. ``--part papers``, never run unless it is named, for it takes three hours of
a processor: six more seeds of every paper's recipe on 50,000 images, judged on all held-out ones,
with ``--samples 50000 --test-samples 10000 --at-a-time 2``. ``--part epochs``, likewise: repeat 4
in as many epochs as the default, on thirty-two seeds (``--seeds 32``), to tell tenths of a point
apart; ``--part tuning-epochs`` is what was tried for it. ``--part many``, likewise: five more on
an accelerator, judged on all held-out images, with ``--samples 50000 --test-samples 10000 --epochs
16 --batch-size 128 --model resnet18 --device cuda --at-a-time 8``. The claims, written before the
runs, are on the page of the trial.

Results lie in ``--output``, one JSON file each, and only missing ones are made.

    python benchmarks/confirmation.py --data CIFAR10 --part virtual
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from fair_trial import JUDGE, TUNE, TUNED_ON, Trial, prepared
from importance_model import MODELS
from tasks import Task, parser, run_missing
from trial.contestants import (
    CONTESTANTS,
    DEFAULT,
    LENGTH,
    LONGER,
    MANY,
    MANY_LONGER,
    STATIC,
    Contestant,
    Setting,
    made,
)
from trial.page import published
from trial.summary import summary_of
from trial.tables import tables
from trial.train import Storage, train

CLAIMED = "foresight, repeat 4"
READS = "uniform, reads of repeat 4"
OTHERS = (DEFAULT, STATIC, "infobatch", "shade x3, hits first", "icache", "impact")


@dataclass(frozen=True)
class Part:
    """Who takes part, on which seeds, and whose claim it is."""

    names: tuple[str, ...]
    seeds: range
    chosen: str = CLAIMED
    clock: str = "simulated"
    is_halved: bool = True
    """Whether half of the held-out images judge, which tuning did not see, or all of them."""


PARTS = {
    "virtual": Part(
        (
            *OTHERS,
            "quiver",
            CLAIMED,
            "foresight, repeat 8",
            READS,
            "uniform, seconds of repeat 4",
            "random pruning as infobatch",
        ),
        range(100, 112),
    ),
    "longer": Part(
        (
            *OTHERS,
            *(f"{name}, {LENGTH} epochs" for name in (*OTHERS, CLAIMED)),
            LONGER,
            "uniform, seconds of repeat 6",
        ),
        range(300, 312),
        LONGER,
    ),
    "live": Part(
        (
            DEFAULT,
            STATIC,
            "shade x3, hits first",
            "icache",
            CLAIMED,
            "foresight, repeat 8",
            LONGER,
        ),
        range(200, 206),
        LONGER,
        "measured",
    ),
    "papers": Part(
        (
            DEFAULT,
            STATIC,
            "quiver",
            "selective backprop",
            "infobatch",
            "shade",
            "shade x3",
            "shade x3, hits first",
            "icache",
            "impact",
            "spidercache",
            CLAIMED,
            LONGER,
            READS,
            "uniform, seconds of repeat 6",
            "random pruning as infobatch",
        ),
        range(500, 506),
        LONGER,
        is_halved=False,
    ),
    "epochs": Part((DEFAULT, STATIC, CLAIMED, "uniform, seconds of repeat 4"), range(600, 632)),
    "many": Part(
        (DEFAULT, STATIC, MANY, "uniform, seconds of repeat 5"),
        range(400, 405),
        MANY,
        is_halved=False,
    ),
    "many-longer": Part(
        (DEFAULT, STATIC, MANY_LONGER, "uniform, seconds of repeat 6, 21 epochs"),
        range(400, 405),
        MANY_LONGER,
        is_halved=False,
    ),
}
ON_REQUEST = ("tuning-epochs", "papers", "epochs", "many", "many-longer")
"""What needs hours or an accelerator: run where it is named only."""
WORKERS = 2
TUNED = (
    ("lru", 10),
    ("foresight:repeat=4:annealed=0.125", 11),
    ("foresight:repeat=4:annealed=0.125", 13),
    ("foresight:repeat=6:annealed=0.125", 13),
    ("foresight:repeat=6:annealed=0.25", 13),
    ("foresight:repeat=8:annealed=0.125", 12),
    ("foresight:repeat=8:annealed=0.125", 14),
    ("foresight:repeat=8:annealed=0.2", 14),
    ("foresight:repeat=12:annealed=0.125", 15),
)
"""Recipes and epochs that were tried for the longer trainings, on :data:`TUNING_SEEDS`."""
TUNED_ON_ALL = (
    ("lru", 10),
    ("foresight:repeat=4:annealed=0.25", 10),
    ("foresight:repeat=4:annealed=0.125", 10),
    ("foresight:repeat=5:annealed=0.125", 10),
    ("foresight:repeat=6:annealed=0.125", 10),
    ("foresight:repeat=8:annealed=0.125", 10),
)
"""Likewise for trainings with as many epochs as the default, on 50,000 images."""
TUNINGS = {"tuning": TUNED, "tuning-epochs": TUNED_ON_ALL}
TUNING_SEEDS = range(TUNED_ON, TUNED_ON + 3)


def main() -> None:
    """Parse the arguments, run what is missing, print the tables."""
    options = parser(
        __doc__,
        samples=4_000,
        test_samples=6_000,
        epochs=10,
        seeds=12,
        output="confirmation-output",
    )
    options.add_argument("--part", choices=(*TUNINGS, *PARTS, "all"), default="all")
    options.add_argument("--model", choices=MODELS, default="tiny")
    options.add_argument("--device", default="cpu", help="where networks are trained")
    options.add_argument("--at-a-time", type=int, default=1, help="trainings (default 1)")
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        if args.smoke:
            args.samples, args.test_samples, args.epochs, args.data = 200, 100, 3, None
            args.batch_size, args.output = 16, Path(own)
        every = [name for name in (*TUNINGS, *PARTS) if name not in ON_REQUEST]
        for name in every if args.part == "all" else [args.part]:
            if name in TUNINGS:
                _tune(name, TUNINGS[name], args)
            else:
                _run_part(name, PARTS[name], args)


def _tune(part: str, tried: tuple[tuple[str, int], ...], args: argparse.Namespace) -> None:
    """Train each recipe with each length on the images of tuning; print and publish the table."""
    tried, seeds = (tried[:2], TUNING_SEEDS[:1]) if args.smoke else (tried, TUNING_SEEDS)
    names = tuple(f"{recipe}, {epochs} epochs" for recipe, epochs in tried)
    trial = Trial(args.output / part, args.samples, args.epochs, seeds, names)
    paths = {name: [trial.path(TUNE, name, seed) for seed in seeds] for name in names}
    if not args.report:
        trial = prepared(trial, args, Storage())
        run_missing(
            [
                Task(path, (), lambda tried=one, seed=seed: _tried(trial, *tried, seed))
                for name, one in zip(names, tried, strict=True)
                for path, seed in zip(paths[name], seeds, strict=True)
            ],
            args.minutes,
            args.at_a_time,
        )
    report = harness.Report(f"{part}: accuracy measured, seconds simulated", args.smoke)
    for name, (recipe, epochs) in zip(names, tried, strict=True):
        runs = [json.loads(path.read_text()) for path in paths[name]]
        told = ", ".join(f"{100 * run['by_epoch'][-1]:.1f}" for run in runs)
        seconds = [sum(epoch["seconds"] for epoch in run["epochs"]) for run in runs]
        mean = round(sum(seconds) / len(runs), 1)
        report.row(recipe=recipe, epochs=epochs, accuracy=told, seconds=mean)
    report.remarks = ["accuracy: % of the held-out images of tuning, seed by seed."]
    harness.show(args, report, part=part)


def _tried(trial: Trial, recipe: str, epochs: int, seed: int) -> dict[str, Any]:
    assert trial.stage is not None and trial.held is not None
    stage, setting = trial.stage, Setting(0.1)
    chosen = made(
        Contestant(recipe, "ours"), setting, trial.samples, stage.total_bytes, stage.batch_size
    )
    with harness.own_runtime():
        return train(stage, chosen, epochs, seed, setting.rate, trial.held[TUNE])


def _run_part(name: str, part: Part, args: argparse.Namespace) -> None:
    """Run what is missing of one part, print and publish its tables."""
    names, seeds = part.names, part.seeds[: args.seeds]
    if args.smoke:
        names, seeds = (DEFAULT, STATIC, "icache", part.chosen), seeds[:1]
    trial = Trial(args.output / name, args.samples, args.epochs, seeds, names, _settings())
    if not args.report:
        trial = prepared(trial, args, Storage(), is_halved=part.is_halved)
        trial = replace(trial, device=args.device)
        tasks = trial.tasks() if part.clock == "simulated" else _live(trial)
        run_missing(tasks, args.minutes, args.at_a_time)
    about = {
        "samples": args.samples,
        "epochs": args.epochs,
        "chosen": part.chosen,
        "clock": part.clock,
        "command": harness.command(),
        "machine": harness.machine(),
    }
    summary = summary_of(trial.folder, about, names)
    reports = tables(summary, args.smoke)
    for report in reports:
        report.title = f"{name}: {report.title}"
    runs = [json.loads(path.read_text()) for path in trial.folder.glob("*/*.json")]
    own = [sum(epoch["seconds"] for epoch in run["epochs"]) for run in runs]  # of the live ones
    took = sum(run.get("cpu_seconds", live) for run, live in zip(runs, own, strict=True))
    harness.show(args, *reports, part=name, runs=summary["judged"], seconds=took)


def _settings() -> dict[str, Setting]:
    """Return what tuning found in the published trial, by contestant."""
    runs = published(Path(__file__).parent)["judged"]
    found = {run["name"]: Setting(*run["setting"]) for run in runs}
    longer = {f"{name}, {LENGTH} epochs": setting for name, setting in found.items()}
    control = found["uniform, seconds of repeat 4"]
    own = {LONGER: Setting(0.1, 0.125), READS: control, "uniform, seconds of repeat 6": control}
    own |= {MANY: Setting(0.1, 0.125), MANY_LONGER: Setting(0.1, 0.125)}
    own |= {f"uniform, seconds of {name}": control for name in ("repeat 5", "repeat 6, 21 epochs")}
    return found | longer | own


def _live(trial: Trial) -> list[Task]:
    """Return the trainings in real time, seed after seed; all train, also those of one plan."""
    assert trial.settings is not None
    rate = trial.settings[DEFAULT].rate
    return [
        Task(
            trial.path(JUDGE, name, seed),
            (),
            lambda name=name, seed=seed: _run(trial, name, seed, rate),
        )
        for seed in trial.seeds
        for name in trial.names
    ]


def _run(trial: Trial, name: str, seed: int, rate: float) -> dict[str, Any]:
    """Train one of them; ``rate`` is of those that take over another one's plan elsewhere."""
    assert trial.stage is not None and trial.held is not None and trial.settings is not None
    one, stage, setting = CONTESTANTS[name], trial.stage, trial.settings[name]
    if one.like is not None:
        setting = Setting(rate)
    recipe = made(one, setting, trial.samples, stage.total_bytes, stage.batch_size)
    with harness.own_runtime():
        epochs = one.epochs or trial.epochs
        found = train(stage, recipe, epochs, seed, setting.rate, trial.held[JUDGE], workers=WORKERS)
    return {"contestant": name, "seed": seed, "setting": list(setting)} | found


if __name__ == "__main__":
    sys.exit(main())
