"""Lengths of epochs that depend on scores, and what goes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parts import number_of, numbers
from torch.utils.data import Subset

from stoker.policy.score import Score
from stoker.prefetch.walk import Marks, Progress, Segment, Walk
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.baselines import InfoBatchSampler, SelectiveSampler
from stoker.tiering.config import read_order

NUM, EPOCHS = 100, 8
selective = Recipe("selective", "", Score(), sampler=part(SelectiveSampler, warm_up=2))
pruned = Recipe("pruned", "", Score(), sampler=part(InfoBatchSampler))


def loader_of(recipe: Recipe, dataset: Any = None, **options: Any) -> Loader:
    dataset = dataset or SampleDataset(numbers(NUM), number_of)
    return Loader(
        dataset, **{"batch_size": 8, "cache": 0, "epochs": EPOCHS} | options, recipe=recipe
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_len_is_exact_in_every_epoch(drop_last: bool) -> None:
    for recipe in (selective, pruned):
        lengths = []
        with loader_of(recipe, drop_last=drop_last) as loader:
            planned = loader.total_steps()
            for _ in range(EPOCHS):
                count = 0
                for ids in loader:
                    count += 1
                    known = len(loader)
                    loader.observe(ids.double())
                    assert loader.weights is not None
                assert count == known
                lengths.append(count)
        assert len(set(lengths)) > 1, "some epochs are shorter"
        assert sum(lengths) <= planned
        if recipe is selective:  # whose lengths are known at construction
            assert sum(lengths) == planned


def test_a_subset_is_sampled_by_the_scores_of_its_own_samples() -> None:
    chosen = list(range(10, 60))
    dataset = Subset(SampleDataset(numbers(NUM), number_of), chosen)
    visits = np.zeros(NUM)
    with loader_of(selective, dataset, epochs=None) as loader:
        for epoch in range(11):
            for ids in loader:
                loader.observe((ids >= 40).double() + ids.double() / 1e3)
                np.add.at(visits, ids.numpy(), epoch >= 2)
    assert visits[:10].sum() == visits[60:].sum() == 0
    assert visits[59] == 9, "the hardest is never left out"
    assert visits[50:60].mean() > 8 > visits[10:20].mean()


def test_what_others_may_serve_is_not_read_ahead() -> None:
    ids = np.arange(20, dtype=np.uint32)
    progress = Progress(20)
    memory = progress.begin(0)
    progress.leave_out(0, ids % 2 == 1)
    marks = Marks(memory.array)
    feed = Walk(np.full(20, 100, np.int64), 4000)
    feed.add(Segment(0, ids, None, marks, marks.generation))
    taken: list[int] = []
    while (group := feed.take(100)) is not None:
        taken += group.ids.tolist()
    # What is left out takes up no room: 10 samples of 100 bytes lie ready at once.
    assert taken == list(range(0, 20, 2))
    progress.finish(0, 0, 20)
    assert feed.advance() == 20


def test_scores_are_exported_for_tiering(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for number in range(6):
        (root / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        (root / f"class{number % 2}" / f"{number}.bin").write_bytes(f"{number:08}".encode())
    from stoker.source import FileSource

    files = sorted(root.rglob("*.bin"))
    dataset = SampleDataset(FileSource(files), number_of)
    with Loader(dataset, batch_size=2, cache=0, recipe="minio") as loader:
        iterator = iter(loader)
        for _ in range(2):
            ids = next(iterator)
            loader.observe(ids.double())
        loader.export_scores(tmp_path / "scores.npz")
        seen = np.flatnonzero(loader.scores.seen)
        values = loader.scores.values
    order, skipped = read_order(tmp_path / "scores.npz", root)
    expected = sorted(seen, key=lambda sample: -values[sample])
    assert order[:4] == [bytes(files[i].relative_to(root)) for i in expected]
    assert len(order) == 6 and skipped == 0
