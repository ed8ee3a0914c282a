"""A fair trial: every recipe trains the same network behind the same storage, tuned alike.

Each contestant (``trial/contestants.py``) is tuned over four settings on one seed and on images of
its own, and then judged on other seeds and other images, paired with uniform epochs of the same
seed. Controls train on uniform epochs for as many reads, or seconds, as ours took, or on as many
random samples. Training is live, through the Loader and its cache; the seconds are those of a
virtual clock, which computes from how each sample was served what storage with ``--reads`` requests
a second and training with ``--compute`` samples a second take. ``--validate`` only holds that clock
against real time, which takes two minutes of a machine that is not busy. ``--simulate`` only
replays the contestants of the published trial, and publishes their hits beside the live ones.

Results lie in ``--output``, one JSON file each, and only missing ones are made: stop and start
again as you like. Tuning comes first, then judging seed after seed. ``--list`` says what is missing
and how long it takes. ``--publish`` writes the page, the plots and the summary of all runs into
``benchmarks/results`` and ``benchmarks/plots``.

    python benchmarks/fair_trial.py --data CIFAR10 --samples 20000 --epochs 18 --model small
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from importance_data import load
from importance_model import MODELS
from importance_record import pruned_at_random
from tasks import Task, parser, run_missing
from trial.contestants import CONTESTANTS, OF_TRIAL, SMOKE, STATIC, Contestant, Setting, made
from trial.page import publish, published
from trial.simulated import simulated
from trial.summary import summary_of
from trial.tables import tables
from trial.train import Stage, Storage, train
from trial.validation import VALIDATED, validated

from stoker.cli._loaders import to_tensor
from stoker.images import decode_image

TUNED_ON = 1_000
"""The seed of tuning; seeds of judging count from 0."""
TUNE, JUDGE, VALIDATE = "tune", "judge", "validate"
Held = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """All runs, and the folder in which their results lie."""

    folder: Path
    samples: int
    epochs: int
    seeds: range
    """Those of judging."""
    names: tuple[str, ...]
    settings: Mapping[str, Setting] | None = None
    """What is judged; None where that comes out of tuning."""
    stage: Stage | None = None
    """None where nothing is to be run."""
    held: dict[str, Held] | None = None
    """Held-out images by phase."""
    device: str = "cpu"
    """Where networks are trained."""

    def tasks(self) -> Iterator[Task]:
        """Yield all results: tuning, then seed after seed."""
        for name in self.names if self.settings is None else ():
            one = CONTESTANTS[name]
            for number, setting in enumerate(one.grid or (Setting(0.0),)):
                if one.like is None or name == STATIC:
                    yield self._task(TUNE, name, TUNED_ON, number, setting)
        for seed in self.seeds:
            for name in self.names:
                yield self._task(JUDGE, name, seed, 0, None)

    def path(self, phase: str, name: str, seed: int, number: int = 0) -> Path:
        """Return the file of one result."""
        label = name.replace(", ", "-").replace(" ", "-")
        told = f"-{number}" if phase == TUNE else ""
        return self.folder / phase / f"{label}{told}-{seed}.json"

    def chosen(self, name: str) -> Setting:
        """Return the setting that is judged: the most accurate one in tuning, if none is given."""
        if self.settings is not None:
            return self.settings[name]
        found = [json.loads(path.read_text()) for path in self._tuned(name)]
        best = max(found, key=lambda one: one["by_epoch"][-1])
        return Setting(*best["setting"])

    def _tuned(self, name: str) -> list[Path]:
        grid = CONTESTANTS[name].grid
        return [self.path(TUNE, name, TUNED_ON, number) for number in range(len(grid))]

    def _task(self, phase: str, name: str, seed: int, number: int, setting: Setting | None) -> Task:
        one = CONTESTANTS[name]
        of = [one.like] if one.like is not None else []
        if one.control is not None:
            of += [one.control.of, STATIC]
        needs = [self.path(phase, other, seed) for other in of]
        if phase == JUDGE and self.settings is None:
            needs += self._tuned(name)

        def run() -> dict[str, Any]:
            own = setting or (self.chosen(name) if one.grid else Setting(0.0))
            others = [json.loads(path.read_text()) for path in needs[: len(of)]]
            return self._run(phase, name, one, seed, own, others)

        return Task(self.path(phase, name, seed, number), tuple(needs), run)

    def _run(
        self,
        phase: str,
        name: str,
        one: Contestant,
        seed: int,
        setting: Setting,
        others: list[dict[str, Any]],
    ) -> dict[str, Any]:
        assert self.stage is not None and self.held is not None
        stage, began = self.stage.on(self.device), time.process_time()
        images, targets = self.held[phase]
        held = images.to(self.device), targets.to(self.device)
        epochs = one.epochs or self.epochs
        recipe = made(one, setting, self.samples, stage.total_bytes, stage.batch_size)
        if one.control is not None and one.control.unit == "sizes":
            sizes = [int(epoch["accesses"]) for epoch in others[0]["epochs"]]
            recipe = pruned_at_random(recipe, sizes)
        elif one.control is not None:
            epochs = self._length(one.control.unit, others[0]["epochs"], others[1]["epochs"])
        taken_over = others[0] if one.like is not None else None
        with harness.own_runtime():
            found = train(stage, recipe, epochs, seed, setting.rate, held, taken_over)
        told = {"contestant": name, "phase": phase, "seed": seed, "setting": list(setting)}
        return told | found | {"cpu_seconds": time.process_time() - began}

    def _length(
        self, unit: str, of: list[dict[str, float]], uniform: list[dict[str, float]]
    ) -> int:
        """Return the epochs of a control; the last one, which is begun, is trained to its end."""
        if unit == "visits":
            visits = sum(epoch["accesses"] for epoch in of)
            return round(self.epochs * self.epochs * self.samples / visits)
        name = {"reads": "fetched", "seconds": "seconds"}[unit]
        allowed = sum(epoch[name] for epoch in of)
        spent = np.cumsum([epoch[name] for epoch in uniform])
        return min(self.epochs, 1 + int(np.searchsorted(spent, allowed)))


def main() -> None:
    """Parse the arguments, run what is missing, print the tables."""
    options = _parser()
    args = options.parse_args()
    if args.simulate and args.publish is None:
        options.error("--simulate replays what is published: give --publish")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        names = OF_TRIAL
        if args.smoke:
            args.samples, args.test_samples, args.epochs, args.seeds = 200, 100, 3, 1
            args.batch_size, args.model, args.data = 16, "tiny", None
            args.output, names = args.output if args.keep else Path(own), SMOKE
        if args.simulate:
            _simulate(args)
            return
        storage = Storage(args.reads, args.compute)
        label = f"{args.model}-{args.samples}x{args.epochs}-{args.reads:g}-{args.compute:g}"
        trial = Trial(args.output / label, args.samples, args.epochs, range(args.seeds), names)
        if args.list:
            _list(trial)
            return
        if not args.report:
            trial = prepared(trial, args, storage)
            tasks = _validations(trial) if args.validate else trial.tasks()
            run_missing(tasks, args.minutes)
        about = {
            "samples": args.samples,
            "test_samples": args.test_samples // 2,
            "epochs": args.epochs,
            "model": args.model,
            "batch_size": args.batch_size,
            "reads": args.reads,
            "compute": args.compute,
            "command": _command(args),
            "machine": harness.machine(),
        }
        summary = summary_of(trial.folder, about, names)
        reports = tables(summary, args.smoke)
        harness.print_all(reports, args.json)
        if args.publish is not None:
            publish(summary, args.publish)


def prepared(
    trial: Trial, args: argparse.Namespace, storage: Storage, *, is_halved: bool = True
) -> Trial:
    """Return the trial with its images read, half of the held-out ones for either phase.

    Or all of them for both, where nothing is tuned.
    """
    images = load(args.data, trial.samples, args.test_samples)
    raw = images.source.read(range(len(images)))
    pixels = torch.stack([to_tensor(decode_image(one)) for one in raw])
    stage = Stage(images, pixels, args.model, args.batch_size, storage)
    halves = {JUDGE: slice(0, None, 2), TUNE: slice(1, None, 2)}
    held = {
        phase: (images.test_images[half], images.test_targets[half])
        for phase, half in (halves if is_halved else dict.fromkeys(halves, slice(None))).items()
    }
    return replace(trial, samples=len(images), stage=stage, held=held)


def _simulate(args: argparse.Namespace) -> None:
    """Replay what was published, on the sizes of the same images, and publish that with it."""
    summary = published(args.publish)
    sizes = load(args.data, summary["about"]["samples"], args.test_samples).source.sizes
    publish(summary | {"simulated": simulated(summary, sizes)}, args.publish)


def _validations(trial: Trial) -> list[Task]:
    assert trial.stage is not None
    stage = trial.stage
    return [
        Task(trial.path(VALIDATE, name, 0), (), lambda name=name: validated(stage, name))
        for name in VALIDATED
    ]


def _list(trial: Trial) -> None:
    """Print what is missing, and for how long a processor is needed."""
    done = [json.loads(path.read_text()) for path in trial.folder.glob("*/*.json")]
    costs = [
        one["cpu_seconds"] / sum(epoch["accesses"] for epoch in one["epochs"])
        for one in done
        if "cpu_seconds" in one
    ]
    each = (float(np.median(costs)) if costs else 3e-4) * trial.samples * trial.epochs
    missing = [task for task in trial.tasks() if not task.path.exists()]
    for task in missing:
        print(f"{task.path.parent.name}/{task.path.stem}: {each:.0f} s at most")
    kind = "measured" if costs else "guessed"
    print(f"{len(missing)} runs, {len(missing) * each / 3600:.1f} hours of a processor ({kind})")


def _command(args: argparse.Namespace) -> str:
    """Return the command that makes these results, apart from folders of this machine."""
    told = (
        f"--samples {args.samples} --test-samples {args.test_samples} --epochs {args.epochs} "
        f"--model {args.model}"
    )
    return f"python benchmarks/fair_trial.py --data CIFAR10 {told}"


def _parser() -> argparse.ArgumentParser:
    result = parser(
        __doc__, samples=20_000, test_samples=10_000, epochs=18, seeds=6, output="trial-output"
    )
    result.add_argument("--model", choices=MODELS, default="small")
    result.add_argument("--reads", type=float, default=1_000, help="reads a second of storage")
    result.add_argument("--compute", type=float, default=5_000, help="samples a second of training")
    result.add_argument("--list", action="store_true", help="print what is missing, run nothing")
    result.add_argument(
        "--validate", action="store_true", help="only hold the clock against real time"
    )
    result.add_argument("--simulate", action="store_true", help="only replay a published trial")
    result.add_argument("--keep", action="store_true", help="--smoke keeps its results in --output")
    return result


if __name__ == "__main__":
    sys.exit(main())
