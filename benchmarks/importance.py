"""What importance does on CIFAR-10: hits by cache size, accuracy, and how far samples are favoured.

Trains every recipe's sampler once a seed through the Loader, writes down what was visited and
scored, and serves that record through each recipe's cache at eight sizes: the production code, only
the model is missing. Some points are confirmed by training with that cache. Results lie in
``--output``, one JSON file each, and only missing ones are run: stop and start again as you like,
also several times at once, one call per processor (the first to lock a result makes it). Seed after
seed, so that tables can be printed early (``--report``).

The default (ResNet-20, 4,000 images, 10 epochs, 3 seeds) takes about two hours of two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from importance_cases import (
    BY_CODE,
    LIVE_AT,
    REPLAYS,
    SHARES,
    TRAINED_AT,
    TRAININGS,
    Replay,
    fitted,
)
from importance_data import Images, load
from importance_model import MODELS
from importance_record import Record, pruned_at_random
from importance_tables import show_all
from importance_train import Settings, replay, top_k_hits, train
from tasks import Task, parser, run_missing

from stoker.recipes import Recipe

FLIPPED = 0.2
"""Share of wrong labels in the second half of the accuracy table."""


@dataclass(frozen=True)
class Bench:
    """The images, the settings, and where results lie."""

    images: Images
    settings: Settings
    folder: Path
    seeds: int
    shares: tuple[float, ...]
    smoke: bool

    def tasks(self) -> Iterator[Task]:
        """Yield all results, in an order that needs no later ones."""
        for seed in range(self.seeds):
            for name in TRAININGS:
                yield self._training(name, TRAINED_AT, seed, 0.0)
            for cache in BY_CODE:
                yield self._training("shade x3", cache, seed, 0.0)
            for name in REPLAYS:
                for cache in self.shares:
                    yield self._replay(name, REPLAYS[name], cache, seed)
            for cache in BY_CODE:
                yield from self._by_code(cache, seed)
            if self.smoke:
                continue
            for name, training in TRAININGS.items():
                if training.flipped:
                    yield self._training(name, TRAINED_AT, seed, FLIPPED)
            if seed == 0:
                for name, training in TRAININGS.items():
                    if training.sizes_of is None:
                        yield self._training(name, LIVE_AT, seed, 0.0)

    def path(self, kind: str, name: str, cache: float, seed: int, flipped: float = 0.0) -> Path:
        """Return the file of one result."""
        label = f"{name.replace(' ', '-').replace(',', '')}-{cache:g}-{seed}"
        return self.folder / kind / f"{label}{'-flipped' if flipped else ''}.json"

    def _training(self, name: str, cache: float, seed: int, flipped: float) -> Task:
        path, training = self.path("train", name, cache, seed, flipped), TRAININGS[name]
        needs = ()
        if training.sizes_of is not None:
            needs = (self.path("train", training.sizes_of, TRAINED_AT, seed, flipped),)

        def run() -> dict[str, Any]:
            recipe = self._fitted(training.recipe(cache))
            for other in needs:
                epochs = json.loads(other.read_text())["epochs"]
                recipe = pruned_at_random(recipe, [int(e["accesses"]) for e in epochs])
            found, record = train(
                self.images,
                recipe,
                cache,
                seed,
                flipped,
                self.settings,
                is_checked=training.is_checked,
            )
            if not flipped:
                record.save(path.with_suffix(".npz"))
            return found | {"training": name, "cache": cache, "seed": seed, "flipped": flipped}

        return Task(path, needs, run)

    def _replay(
        self, name: str, case: Replay, cache: float, seed: int, trained_at: float = TRAINED_AT
    ) -> Task:
        trained = self.path("train", case.of, trained_at, seed)

        def run() -> dict[str, Any]:
            record = Record.load(trained.with_suffix(".npz"))
            top = top_k_hits(self.images, record, cache)
            recipe = self._fitted(case.recipe(cache))
            if case.hits_first:
                record = record.highest_first(len(self.images))
            epochs = replay(self.images, recipe, cache, record, self.settings, seed)
            found = {"replay": name, "cache": cache, "seed": seed, "of": case.of}
            return found | {"epochs": epochs, "top_k": top}

        return Task(self.path("replay", name, cache, seed), (trained,), run)

    def _fitted(self, recipe: Recipe) -> Recipe:
        return fitted(recipe, int(self.images.source.sizes.sum()))

    def _by_code(self, cache: float, seed: int) -> Iterator[Task]:
        case = Replay("shade x3", TRAININGS["shade x3"].recipe)
        yield self._replay("shade x3", case, cache, seed, cache)
        yield self._replay(
            "shade x3 hits first", replace(case, hits_first=True), cache, seed, cache
        )


def main() -> None:
    """Parse the arguments, run what is missing, print the tables."""
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        if args.smoke:
            args.samples, args.test_samples, args.epochs, args.seeds = 160, 60, 3, 1
            args.batch_size, args.output, args.model = 16, Path(own), "tiny"
        settings = Settings(args.epochs, args.batch_size, args.model)
        name = f"{args.model}-{args.samples}x{args.epochs}"
        bench = Bench(
            load(args.data, args.samples, args.test_samples),
            settings,
            args.output / name,
            args.seeds,
            SHARES[1:5:3] if args.smoke else SHARES,
            args.smoke,
        )
        if not args.report:
            run_missing(bench.tasks(), args.minutes)
        show_all(bench.folder, len(bench.images), settings, args)


def _parser() -> argparse.ArgumentParser:
    result = parser(
        __doc__, samples=4_000, test_samples=5_000, epochs=10, seeds=3, output="importance-output"
    )
    result.add_argument("--model", choices=MODELS, default="resnet20")
    result.add_argument("--threads", type=int, default=1, help="of torch: free processors")
    return result


if __name__ == "__main__":
    main()
