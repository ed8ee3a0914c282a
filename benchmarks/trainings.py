"""What benchmarks of accuracy share: some trainings a seed, and a table of what they end at."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from harness import Report, show
from importance_data import Images, load
from importance_train import Settings
from tasks import Task, run_missing

Tasks = Callable[[Images, Settings, Path, int], Iterable[Task]]
"""From images, how to train, the folder of results, and the number of seeds."""
Table = Callable[[Path, str, bool], Report]
"""From the folder of results, what they are about, and whether it is a smoke test."""


def train_and_show(args: argparse.Namespace, model: str, tasks: Tasks, table: Table) -> None:
    """Train what is missing, on images tested on all others, and print the table."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        if args.smoke:
            args.samples, args.test_samples, args.epochs, args.seeds = 160, 60, 4, 1
            args.batch_size, args.output, model = 16, Path(own), "tiny"
        settings = Settings(args.epochs, args.batch_size, model, looks_each_epoch=False)
        folder = args.output / f"{model}-{args.samples}x{args.epochs}"
        if not args.report:
            images = load(args.data, args.samples, args.test_samples, tests_on_rest=True)
            run_missing(tasks(images, settings, folder, args.seeds), args.minutes)
        about = f"{args.samples} images, {args.epochs} epochs, {model} network"
        show(args, table(folder, about, args.smoke))
