"""One training through the Loader: what it cost, what was served, how accurate it came out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from importance_data import Images
from importance_model import Trainer
from importance_record import Record, Recorder, played
from numpy.typing import NDArray

import stoker
from stoker.recipes import Recipe

PACE = 0.04
"""Seconds between the batches of a replay with packages, which a process builds and loads beside
it: about what a training step takes. Without them a replay goes as fast as it can."""

TOP = (0.01, 0.2)
"""Shares of the samples, the most important ones, whose scores are held against fresh losses."""

COUNTS = ("accesses", "hits", "substituted", "packaged", "fetched", "rescored")


@dataclass(frozen=True)
class Settings:
    """What is the same for every training."""

    epochs: int
    batch_size: int
    model: str
    looks_each_epoch: bool = True
    """Measure accuracy after each epoch, and not only after the last."""


def train(
    images: Images,
    recipe: Recipe,
    cache: float,
    seed: int,
    flipped: float,
    settings: Settings,
    *,
    is_checked: bool = False,
) -> tuple[dict[str, Any], Record]:
    """Train with ``recipe`` over a cache of that share; return what came out, and the record.

    ``is_checked``: hold the scores that each plan was made from against a full evaluation.
    """
    labels = images.labels(flipped, seed)
    record = Record()
    recorders: list[Recorder] = []

    def recording(num_samples: int) -> Recorder:
        recorders.append(Recorder(recipe.scorer(num_samples), record))
        return recorders[-1]

    trainer = Trainer(settings.model, images.num_classes, seed)
    with stoker.Loader(
        images.dataset(labels),
        batch_size=settings.batch_size,
        cache=stoker.Cache(f"{100 * cache:g}%", prefetch=0),
        recipe=replace(recipe, scorer=recording),
        epochs=settings.epochs,
        seed=seed,
        rescore=trainer.rescore if recipe.scorer(len(images)).rescores else None,
    ) as loader:
        epochs, precisions = [], []
        for epoch in range(settings.epochs):
            began, before, ids = time.perf_counter(), loader.stats, []
            recorders[-1].is_training = False
            for step, (pictures, targets) in enumerate(loader):
                recorders[-1].is_training = True
                if is_checked and epoch and not step:
                    fresh = evaluated(trainer, images, labels)
                    precisions.append(precision(loader.scores.values, fresh))
                ids.append(loader.last_ids)
                losses, logits, embeddings = trainer.forward(pictures, targets)
                loader.observe(losses, logits=logits, embeddings=embeddings, labels=targets)
                done = (epoch + step / len(loader)) / settings.epochs
                trainer.step((losses * loader.weights).mean(), done)
            seconds = time.perf_counter() - began
            record.visited.append(np.concatenate(ids))
            if settings.looks_each_epoch or epoch == settings.epochs - 1:
                by_class = trainer.accuracies(
                    images.test_images, images.test_targets, images.num_classes
                )
                record.accuracies.append(float(by_class.mean()))
                loader.end_epoch(accuracy=by_class.mean())
            epochs.append(_counted(loader, before) | {"seconds": seconds})
    return {
        "accuracy": float(by_class.mean()),
        "worst_class": float(by_class.min()),
        "by_epoch": record.accuracies,
        "precision": precisions,
        "epochs": epochs,
    }, record


def evaluated(trainer: Trainer, images: Images, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return f64[N], the losses of all training images as the network stands."""
    dataset = images.dataset(labels)
    losses = []
    for ids in np.array_split(np.arange(len(images)), -(-len(images) // 500)):
        pictures, targets = zip(*dataset.__getitems__(ids.tolist()), strict=True)
        losses.append(trainer.rescore((torch.stack(pictures), torch.tensor(targets))))
    return torch.cat(losses).double().numpy()


def precision(scores: NDArray[np.float64], fresh: NDArray[np.float64]) -> list[float]:
    """Return for each share of :data:`TOP` which part of the top by scores is the top by losses."""
    found = []
    for share in TOP:
        count = max(1, round(share * len(fresh)))
        best = [np.argsort(-values, kind="stable")[:count] for values in (scores, fresh)]
        found.append(len(np.intersect1d(*best)) / count)
    return found


def replay(
    images: Images, recipe: Recipe, cache: float, record: Record, settings: Settings, seed: int
) -> list[dict[str, float]]:
    """Serve a record through ``recipe``'s cache of that share; return the counts by epoch."""
    dataset = stoker.SampleDataset(images.source)
    with stoker.Loader(
        dataset,
        batch_size=settings.batch_size,
        collate_fn=len,
        cache=stoker.Cache(f"{100 * cache:g}%", prefetch=0),
        recipe=played(recipe, record),
        epochs=len(record.visited),
        seed=seed,
        rescore=torch.zeros,
    ) as loader:
        epochs = []
        for accuracy in record.accuracies:
            before = loader.stats
            for length in loader:
                loader.observe(torch.zeros(length))
                time.sleep(PACE if recipe.packaging else 0)
            loader.end_epoch(accuracy=accuracy)
            epochs.append(_counted(loader, before))
    return epochs


def _counted(loader: stoker.Loader, before: Any) -> dict[str, float]:
    now = loader.stats
    spent = now.since(before)
    counts: dict[str, float] = {name: getattr(spent, name) for name in COUNTS}
    return counts | {"ess": now.ess, "coverage": now.coverage}


def top_k_hits(images: Images, record: Record, cache: float) -> list[float]:
    """Return by epoch the share of visits to the samples that scored highest as it began.

    As many as fit the cache: what a cache ordered by score could hit at best if it were filled
    with them when the epoch begins and then stood still. Unseen samples fill what is left.
    """
    budget = cache * images.source.sizes.sum()
    shares = []
    for scores, visited in record.scores_before(len(images)):
        best = np.argsort(-scores, kind="stable")
        held = np.zeros(len(images), np.bool_)
        held[best[np.cumsum(images.source.sizes[best]) <= budget]] = True
        shares.append(float(held[visited].mean()))
    return shares
