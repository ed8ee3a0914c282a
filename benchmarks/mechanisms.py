"""What the single mechanisms of the papers do: each replayed off and on, with the same seeds.

Simulated. Losses are made up (``stoker.sim.signals.MadeUpLosses``), and for SpiderCache embeddings
are: 64 numbers, classes that move apart as epochs go by, clusters within them, and noise. Samples
have one size, the cache holds 20 % of them; of 24 epochs the last 12 count, since ImPACT's warm-up
may take ten. Accuracy is not simulated.

    python benchmarks/mechanisms.py [--seeds 3] [--samples N] [--neighbours N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from harness import Report, add_options, show

from stoker import recipes
from stoker.importance.base import Neighbours, Observation, Scorer, Signal
from stoker.importance.graph import Graph
from stoker.recipes import Recipe
from stoker.recipes.spidercache import neighbours_for
from stoker.scores import Scores
from stoker.sim import replay

CACHE = 0.2
BATCH = 128
DIMENSION = 64
CLASSES, CLUSTERS = 10, 200
SHADE = "shade:repetition=3:important=0.2"


@dataclass(frozen=True)
class Mechanism:
    """One mechanism, off first."""

    name: str
    off: str
    on: tuple[str, ...]
    paper: str
    """What the paper, or its public code, says of it."""


MECHANISMS = (
    Mechanism(
        "SHADE: order of an epoch",
        SHADE,
        (f"{SHADE}:order=hits_first",),
        "the public code's; 72.5 % hits at 20 % (ResNet-18, CIFAR-10)",
    ),
    Mechanism(
        "SHADE: entries <importance, frequency>",
        SHADE,
        (f"{SHADE}:frequency=true",),
        "of equal importance the less accessed leaves; no figure for it",
    ),
    Mechanism(
        "SHADE: ls_param",
        SHADE,
        (f"{SHADE}:smoothing=0.01", f"{SHADE}:smoothing=1"),
        "not in the paper; 0.01 in the public code",
    ),
    Mechanism(
        "iCache: an H/L split that moves",
        "icache",
        ("icache:split=moving",),
        "sizes follow accesses; hits with substitutes 37 % at 20 %",
    ),
    Mechanism(
        "iCache: ST_HC",
        "icache",
        ("icache:substitute=high",),
        "a variant beside ST_LC, the default here; no hits for it",
    ),
    Mechanism(
        "ImPACT: +IIP, and over LFU",
        "lru",
        ("impact:parts=iip", "impact:parts=iip+lfu", "impact:parts=iis+hc", "impact"),
        "steps of its ablation; hits with substitutes 37 % (H-cache), 43 % (all) at 20 %",
    ),
    Mechanism(
        "ImPACT: an H/L split that moves",
        "impact",
        ("impact:split=moving",),
        "as iCache",
    ),
)

SPIDER = (
    Mechanism(
        "SpiderCache: neighbours by the number of samples",
        "spidercache:neighbor_max=500:target_degree=50",
        ("spidercache",),
        "500 neighbours, of 50,000 samples",
    ),
    Mechanism(
        "SpiderCache: transit by the batch",
        "spidercache:transit=0.05",
        ("spidercache", "spidercache:transit=0.25"),
        "no such region",
    ),
    Mechanism(
        "SpiderCache: product quantization",
        "spidercache",
        ("spidercache:code_bytes=16", "spidercache:code_bytes=8"),
        "compresses its index (Table 2)",
    ),
)


class EmbeddedGraph(Scorer):
    """SpiderCache's graph over made-up embeddings; ``parameters`` are those of its recipe."""

    needs: ClassVar[frozenset[Signal]] = frozenset({"losses"})

    def __init__(self, num_samples: int, seed: int, parameters: dict[str, Any]) -> None:
        given = dict(parameters)
        scale = neighbours_for(
            num_samples, given.pop("neighbor_max", None), given.pop("target_degree", None)
        )
        self.graph = Graph(num_samples, **scale._asdict(), **given)
        rng = np.random.default_rng([seed, 0xE3B])
        self._labels = rng.integers(0, CLASSES, num_samples)
        self._cluster = self._labels + CLASSES * rng.integers(0, CLUSTERS // CLASSES, num_samples)
        self._of_class = rng.standard_normal((CLASSES, DIMENSION))
        self._of_cluster = rng.standard_normal((CLUSTERS, DIMENSION))
        self._own = rng.standard_normal((num_samples, DIMENSION))
        self._seed = seed
        self.vector_bytes: int = given.get("code_bytes") or 4 * DIMENSION
        self.recalls: list[float] = []

    @property
    def neighbours(self) -> Neighbours | None:
        """Those of the batch scored last."""
        return self.graph.neighbours

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Have the graph look at its index."""
        self.graph.begin_epoch(scores, epoch)
        self.recalls.append(self.graph.recall)

    def update(self, scores: Scores, observation: Observation) -> None:
        """Score a batch by the embeddings that it would have now."""
        ids, apart = observation.ids, 1 - np.exp(-(observation.epoch + 1) / 4)
        noise = np.random.default_rng([self._seed, observation.step]).standard_normal
        vectors = 2 * apart * self._of_class[self._labels[ids]]
        vectors += (
            self._of_cluster[self._cluster[ids]]
            + 0.7 * self._own[ids]
            + 0.3 * noise((len(ids), DIMENSION))
        )
        shown = replace(
            observation, embeddings=vectors.astype(np.float32), labels=self._labels[ids]
        )
        self.graph.update(scores, shown)


@dataclass
class Found:
    """What a setting had, a value for each seed."""

    values: dict[str, list[float]] = field(default_factory=dict)
    vector_bytes: int | None = None
    """Of an embedding."""

    def add(self, **values: float) -> None:
        """Note the values of a seed."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def cells(self) -> dict[str, str | int | None]:
        """Return mean and half the range of each."""
        shares = {
            name: f"{np.mean(each):.1f} ± {np.ptp(each) / 2:.1f}"
            for name, each in self.values.items()
        }
        return {**shares, "vector_bytes": self.vector_bytes}


def run(text: str, samples: int, epochs: int, seeds: int, cache: float = CACHE) -> Found:
    """Replay a recipe with each seed; shares in percent of the accesses that count."""
    found = Found()
    for seed in range(seeds):
        made: list[EmbeddedGraph] = []
        recipe = recipes.get(text)
        if text.startswith("spidercache"):
            recipe = replace(recipe, scorer=_embedded(recipe, seed, made))
        late = replay(recipe, samples, epochs, cache, seed=seed, batch_size=BATCH)
        late = late.after(epochs // 2)
        found.add(
            hits=100 * late.hit_ratio,
            substituted=100 * late.substituted_ratio,
            packaged=100 * late.packaged_ratio,
            coverage=100 * late.coverage,
            ess=100 * late.ess,
        )
        if made:
            found.add(recall=100 * float(np.mean(made[-1].recalls[epochs // 2 :])))
            found.vector_bytes = made[-1].vector_bytes
    return found


def _embedded(recipe: Recipe, seed: int, made: list[EmbeddedGraph]) -> Callable[[int], Scorer]:
    parameters = dict(recipe.scorer.parameters)  # type: ignore[attr-defined]

    def make(seed: int, num_samples: int) -> Scorer:
        made.append(EmbeddedGraph(num_samples, seed, parameters))
        return made[-1]

    return partial(make, seed)


def table(
    report: Report, mechanisms: tuple[Mechanism, ...], run_one: Callable[[str], Found]
) -> None:
    """Add a row for each setting; what is off in several rows is run once."""
    done = dict[str, Found]()
    for mechanism in mechanisms:
        for text in (mechanism.off, *mechanism.on):
            if text not in done:
                done[text] = run_one(text)
            report.row(
                mechanism=mechanism.name,
                recipe=f"`{text}`",
                is_on="no" if text == mechanism.off else "yes",
                **done[text].cells(),
                paper=mechanism.paper if text == mechanism.off else "",
            )


def main() -> None:
    """Parse the arguments, replay, print the table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, default=3, help="0 to one less")
    arguments.add_argument("--samples", type=int, default=10_000)
    arguments.add_argument("--neighbours", type=int, default=4_000, help="samples of SpiderCache's")
    add_options(arguments)
    args = arguments.parse_args()
    seeds, epochs = (1, 4) if args.smoke else (args.seeds, 24)
    counts = [1_000, 1_000] if args.smoke else [args.samples, args.neighbours]
    report = Report(
        f"Off and on, c = 20 %, {counts[0]} samples (SpiderCache {counts[1]}), "
        f"seeds 0 to {seeds - 1}, in percent"
    )
    for mechanisms, count in zip((MECHANISMS, SPIDER), counts, strict=True):
        run_one = partial(run, samples=count, epochs=epochs, seeds=seeds)
        table(report, mechanisms, run_one)
    show(args, report)


if __name__ == "__main__":
    main()
