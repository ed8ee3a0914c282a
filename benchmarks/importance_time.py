"""How long training takes with each recipe when storage is the limit: an epoch, and to an accuracy.

A small network on CIFAR-10, read as JPEG files through FUSE from storage with a limit of requests a
second. The cache is a fifth of the data, and all recipes read ahead alike. Training has one
processor and the storage, the workers and everything else the other. Results lie in ``--output``,
one JSON file each, and only missing ones are run: stop and start again as you like. Seed after
seed, so that tables can be printed early (``--report``).

The default (4,000 images, 8 epochs, 3 seeds) takes about 40 minutes. Times are only as good as the
machine is quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from feed_servers import Unavailable, slow_folder
from harness import own_runtime
from importance_cases import fitted
from importance_data import Images, load
from importance_model import Trainer
from importance_time_cases import CACHE, FORESIGHT, PLAIN, SMOKE, TIMED, Timed
from importance_time_tables import show_all
from tasks import Task, parser, run_missing

import stoker
from stoker.cli.demo import write_digits

COUNTS = (
    "accesses",
    "hits",
    "substituted",
    "packaged",
    "fetched",
    "rescored",
    "package_reads",
    "rebuild_reads",
    "stall_seconds",
    "scoring_seconds",
    "rescoring_seconds",
)
WORKERS = 2
LATENCY_MS = 2  # of an open, and of a read
MB_PER_S = 100


@dataclass(frozen=True)
class Bench:
    """The images behind slow storage, and how they are trained on."""

    images: Images
    folder: Path
    epochs: int
    batch_size: int
    seeds: int
    names: Sequence[str]

    def tasks(self) -> Iterator[Task]:
        """Yield all results, seed after seed."""
        for seed in range(self.seeds):
            for name in self.names:
                label = name.replace(" ", "-").replace(",", "")
                yield Task(self.folder / f"{label}-{seed}.json", (), self._run(name, seed))

    def _run(self, name: str, seed: int) -> Any:
        def run() -> dict[str, Any]:
            with own_runtime():
                epochs = self._train(TIMED[name], seed)
            return {"training": name, "seed": seed, "epochs": epochs}

        return run

    def _train(self, case: Timed, seed: int) -> list[dict[str, float]]:
        """Train; return what each epoch took, counted and reached."""
        images = self.images
        recipe = fitted(case.recipe(), int(images.source.sizes.sum()))
        trainer = Trainer("small", images.num_classes, seed)
        with stoker.Loader(
            images.dataset(images.targets),
            batch_size=self.batch_size,
            num_workers=WORKERS,
            persistent_workers=True,
            cache=stoker.Cache(
                f"{CACHE:.0%}", prefetch=stoker.Cache.prefetch if case.prefetch else 0
            ),
            recipe=recipe,
            epochs=self.epochs,
            seed=seed,
            rescore=trainer.rescore if recipe.scorer(len(images)).rescores else None,
        ) as loader:
            found = []
            for epoch in range(self.epochs):
                before, began = loader.stats, time.perf_counter()
                for step, (pictures, targets) in enumerate(loader):
                    losses, logits, embeddings = trainer.forward(pictures, targets)
                    loader.observe(losses, logits=logits, embeddings=embeddings, labels=targets)
                    done = (epoch + step / len(loader)) / self.epochs
                    trainer.step((losses * loader.weights).mean(), done)
                seconds = time.perf_counter() - began
                by_class = trainer.accuracies(
                    images.test_images, images.test_targets, images.num_classes
                )
                loader.end_epoch(accuracy=by_class.mean())
                spent = loader.stats.since(before)
                counts = {name: float(getattr(spent, name)) for name in COUNTS}
                found.append(counts | {"seconds": seconds, "accuracy": float(by_class.mean())})
        return found


def main() -> None:
    """Parse the arguments, run what is missing, print the tables."""
    args = _parser().parse_args()
    torch.set_num_threads(1)  # the other processor is for the storage and the workers
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        if args.smoke:
            args.samples, args.test_samples, args.epochs, args.seeds = 200, 100, 3, 1
            args.batch_size, args.iops, args.output = 16, 2_000, Path(own)
        folder = args.output / f"{args.samples}x{args.epochs}-{args.iops:g}" / "time"
        if not args.report:
            try:
                _measure(args, folder)
            except Unavailable as reason:
                print(f"left out: {reason}", file=sys.stderr)
                return
        show_all(folder, args)


def _measure(args: argparse.Namespace, folder: Path) -> None:
    """Mount the slow storage and run what is missing; raises Unavailable without FUSE."""
    with contextlib.ExitStack() as stack:
        root = args.data or stack.enter_context(_digits())
        train = root / "train"
        far = stack.enter_context(slow_folder(train, LATENCY_MS, LATENCY_MS, MB_PER_S, args.iops))
        images = load(root, args.samples, args.test_samples).seen_through(train, far)
        stack.callback(images.source.close)
        names = SMOKE if args.smoke else FORESIGHT if args.foresight else PLAIN
        bench = Bench(images, folder, args.epochs, args.batch_size, args.seeds, names)
        run_missing(bench.tasks(), args.minutes)


@contextlib.contextmanager
def _digits() -> Iterator[Path]:
    """The digits, to train on and to test with: only for a look at whether it runs."""
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        folder = write_digits(Path(own) / "digits", copies=1)
        for name in ("train", "test"):
            (Path(own) / name).symlink_to(folder)
        yield Path(own)


def _parser() -> argparse.ArgumentParser:
    result = parser(
        __doc__, samples=4_000, test_samples=5_000, epochs=8, seeds=3, output="importance-output"
    )
    result.add_argument("--iops", type=float, default=2_000, help="opens and reads a second")
    result.add_argument("--foresight", action="store_true", help="only it and the papers' best")
    result.add_argument("--margin", type=float, default=1.0, help="points below uniform epochs")
    return result


if __name__ == "__main__":
    main()
