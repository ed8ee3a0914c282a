"""What scoring costs beside a training step of the small CNN, by scorer.

A step moves the batch's signals from torch to NumPy as the loader does, and has them scored; its
time is compared with that of a step which scores nothing, and the time spent scoring is measured by
itself, since it is too short for a difference of steps. A graph has the embeddings of the whole
data set to search, once in the training thread and once beside the backward pass; there its time is
what the step grows by. Images are random: only time is measured.

Then ImPACT trains through the Loader from memory, and its seconds between epochs, in which samples
are rescored, are compared with those of the whole epochs after its warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from harness import Report, interleave, paired_ratio, parser, show
from importance_cases import fitted
from importance_data import load
from importance_model import Trainer

import stoker
from stoker import recipes
from stoker.importance.base import Background, Observation, Scorer
from stoker.importance.baselines import GradientNorm, InBatchRank, LossHistory, ReducibleLoss
from stoker.importance.graph import Graph
from stoker.importance.hybrid import Hybrid
from stoker.pytorch.observe import Shown, start_copy
from stoker.scores import Scores

CHEAP = ("loss", "rank", "gradient")
NUM_CLASSES = 10


def main() -> None:
    """Parse the arguments, measure all scorers, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=50_000)
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--steps", type=int, default=20, help="a round and scorer")
    arguments.add_argument("--data", type=Path, help="folder with train/ and test/, for ImPACT")
    args = arguments.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    reports = [_beside_steps(args), _between_epochs(args)]
    show(args, *reports)


def _beside_steps(args: argparse.Namespace) -> Report:
    """Return what each scorer takes of a step."""
    samples, batch, steps = (200, 16, 2) if args.smoke else (args.samples, args.batch, args.steps)
    scorers: dict[str, Callable[[], Scorer | None]] = {
        "none": lambda: None,
        "loss": LossHistory,
        "rank": InBatchRank,
        "gradient": GradientNorm,
        "reducible": lambda: ReducibleLoss(np.zeros(samples)),
        "hybrid": lambda: Hybrid(samples, samples // 5),
        "graph, in the step": lambda: Graph(samples),
        "graph, beside it": lambda: Background(Graph(samples)),
    }
    runs = {name: Run(make(), samples, batch, steps) for name, make in scorers.items()}
    rounds = 1 if args.smoke else args.rounds
    times = interleave({name: run.round for name, run in runs.items()}, rounds)
    report = Report(
        f"Cost of scoring batches of {batch}, {samples} samples, small CNN, two threads", args.smoke
    )
    for name, run in runs.items():
        share = statistics.median(run.shares)
        report.row(
            scorer=name,
            **{
                "ms a step": 1e3 * statistics.median(times[name]),
                "to a step without": paired_ratio(times[name], times["none"]),
                "µs in observe": 1e6 * statistics.median(run.seconds),
                "% of the step": 100 * share,
            },
        )
        if name in CHEAP:
            report.target(f"scoring by {name}", 100 * share, 5, "% of the step")
        run.close()
    return report


WARM_UP, CYCLES = 2, 2
"""Epochs of ImPACT's warm-up, and cycles of three epochs, one of them full, after it."""


def _between_epochs(args: argparse.Namespace) -> Report:
    """Return the share of training time that ImPACT's rescoring takes."""
    samples, batch = (80, 16) if args.smoke else (4_000, args.batch)
    images = load(args.data, samples, 100)
    report = Report(f"ImPACT's evaluation, {len(images)} images in memory, small CNN", args.smoke)
    for evaluation in ("hybrid", "realtime"):
        options = {"warm_up": WARM_UP, "max_warm_up": WARM_UP, "evaluation": evaluation}
        recipe = fitted(recipes.impact(**options), int(images.source.sizes.sum()))
        trainer, epochs = Trainer("small", images.num_classes, seed=0), WARM_UP + 3 * CYCLES
        with stoker.Loader(
            images.dataset(images.targets),
            batch_size=batch,
            cache=stoker.Cache("20%", prefetch=0),
            recipe=recipe,
            epochs=epochs,
            rescore=trainer.rescore,
        ) as loader:
            for epoch in range(epochs):
                if epoch == WARM_UP:
                    before, began = loader.stats, time.perf_counter()
                for pictures, targets in loader:
                    losses, _, _ = trainer.forward(pictures, targets)
                    loader.observe(losses)
                    trainer.step((losses * loader.weights).mean(), 0.5)
            seconds, spent = time.perf_counter() - began, loader.stats.since(before)
        share = 100 * spent.rescoring_seconds / seconds
        report.row(
            evaluation=evaluation,
            **{
                "s an epoch": seconds / (3 * CYCLES),
                "rescored an epoch": spent.rescored // (3 * CYCLES),
                "s for it": spent.rescoring_seconds / (3 * CYCLES),
                "% of the time": share,
            },
        )
        if evaluation == "hybrid":
            report.target("rescoring, hybrid", share, 6, "% of the time")
    report.remarks = [
        "A quarter of a cache of 20 % is for volatile samples, so a twentieth of all is rescored. "
        "For both, the training process reads and decodes the samples."
    ]
    return report


@dataclass
class Run:
    """One scorer with a model and scores of its own."""

    scorer: Scorer | None
    samples: int
    batch: int
    steps: int
    shares: list[float] = field(default_factory=list)
    """Of the step that scoring takes in the training thread, by round."""
    seconds: list[float] = field(default_factory=list)
    """That scoring takes in the training thread, a step, by round."""

    def __post_init__(self) -> None:
        self._trainer = Trainer("small", NUM_CLASSES, seed=0)
        self._scores, self._step = Scores(self.samples), 0
        self._rng = np.random.default_rng(0)
        self._labels = torch.arange(self.samples) % NUM_CLASSES
        self._images = torch.randint(0, 256, (1024, 3, 32, 32), dtype=torch.uint8)
        if isinstance(self.scorer, Graph | Background):
            self._fill(self.scorer)

    def round(self) -> float:
        """Train for some steps; return seconds a step."""
        scoring, begin = 0.0, time.perf_counter()
        for _ in range(self.steps):
            scoring += self._train()
        if isinstance(self.scorer, Background):
            self.scorer.drain()
        total = time.perf_counter() - begin
        self.shares.append(scoring / total)
        self.seconds.append(scoring / self.steps)
        return total / self.steps

    def close(self) -> None:
        """End the scorer's threads."""
        close = getattr(self.scorer, "close", None)
        if close is not None:
            close()

    def _train(self) -> float:
        """Take one step; return the seconds that its scoring took."""
        ids = self._rng.integers(0, self.samples, self.batch).astype(np.uint32)
        labels = self._labels[ids.astype(np.int64)]
        images = self._images[ids.astype(np.int64) % len(self._images)]
        losses, logits, embeddings = self._trainer.forward(images, labels)
        begin = time.perf_counter()
        if self.scorer is not None:
            shown = Shown(losses, logits, labels, embeddings)
            signals = start_copy(shown.signals(self.scorer.needs, len(ids))).arrays()
            self.scorer.update(self._scores, Observation(ids, self._step, 0, **signals))
        spent = time.perf_counter() - begin
        self._step += 1
        self._trainer.step(losses.mean(), 0.5)
        return spent

    def _fill(self, scorer: Graph | Background) -> None:
        """Let a graph know an embedding of every sample, with the classes apart."""
        width = self._trainer.network.classifier.in_features
        labels = self._labels.numpy()
        centres = self._rng.standard_normal((NUM_CLASSES, width), dtype=np.float32)
        noise = self._rng.standard_normal((self.samples, width), dtype=np.float32)
        known = {
            "ids": np.arange(self.samples, dtype=np.uint32),
            "vectors": centres[labels] + noise,
            "labels": labels,
            "radius": np.array(0.0),  # not calibrated yet
            "measured_at": np.array(-1),
        }
        scorer.load_state_dict(known)


if __name__ == "__main__":
    main()
