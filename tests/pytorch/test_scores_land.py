"""score_lands_on_the_served_sample: the table equals what the model says of each sample.

The model's "loss" of sample ``i`` is f(i), computed from the bytes that arrived, so a score that
went to another sample than the one served shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers
from support.ranks import run_ranks

from pytorch.once import LOW
from stoker import Cache, recipes
from stoker.importance.baselines import LossHistory
from stoker.policy.base import Substitution
from stoker.policy.baselines import MinIO
from stoker.policy.score import Score
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.baselines import InfoBatchSampler, WeightedSampler
from stoker.sampler.pads import PadsSampler
from stoker.types import Outcome

# Validation is beside the point here.
pytestmark = pytest.mark.filterwarnings("ignore:the recipe goes by validation accuracy")

NUM = 120


def f(ids: Any) -> torch.Tensor:
    numbers = torch.as_tensor(np.asarray(ids, np.int64))
    return ((numbers * 37) % 101).double() / 7 + 0.5


def loader_of(recipe: Any, **options: Any) -> Loader:
    targets = (np.arange(NUM) * 13) % 29
    dataset = SampleDataset(numbers(NUM), number_of, targets=targets)
    defaults: dict[str, Any] = {"batch_size": 8, "cache": "40%", "epochs": 8}
    return Loader(dataset, recipe=recipe, **{**defaults, **options})


pruned = Recipe("pruned", "", Score(), sampler=part(InfoBatchSampler))
RECIPES = [
    Recipe("plain", "", MinIO()),
    Recipe("any", "", MinIO(), substitution=Substitution("any", "main")),
    Recipe("weighted", "", Score(), sampler=part(WeightedSampler)),
    Recipe("pads", "", Score(), sampler=part(PadsSampler)),
    LOW,
]


def check(loader: Loader, seen: Any) -> None:
    scores = loader.scores
    np.testing.assert_array_equal(scores.seen, seen)
    known = scores.seen > 0
    np.testing.assert_array_equal(scores.values[known], f(np.flatnonzero(known)).numpy())


def batches(loader: Loader, epochs: int) -> Iterator[Any]:
    for _ in range(epochs):
        yield from loader


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_score_lands_on_the_served_sample(recipe: Recipe, num_workers: int) -> None:
    seen = np.zeros(NUM, np.int64)
    outcomes: list[int] = []
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    with loader_of(recipe, **workers) as loader:
        for ids, targets in batches(loader, 4):
            assert loader.last_ids.tolist() == ids.tolist()
            # label_matches_bytes
            assert targets.tolist() == ((ids.numpy() * 13) % 29).tolist()
            loader.observe(f(ids))
            np.add.at(seen, ids.numpy(), 1)
            outcomes += loader.last_outcomes.tolist()
        check(loader, seen)
        stats = loader.stats
    counts = np.bincount(outcomes, minlength=len(Outcome))
    assert counts[Outcome.SUBSTITUTED] == stats.substituted
    assert bool(stats.substituted) == (recipe.substitution is not None)
    # cold_misses_count: nothing was cached at first, so whatever was served was read once.
    assert stats.fetched >= np.count_nonzero(seen) > 0
    assert stats.hits + stats.substituted + stats.fetched + stats.packaged == stats.accesses


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_score_lands_on_the_served_sample_under_gradient_accumulation(recipe: Recipe) -> None:
    """Batches are drawn ahead, as Accelerate does: four, then observed in another order."""
    seen = np.zeros(NUM, np.int64)
    with loader_of(recipe, return_meta=True) as loader:
        for _ in range(3):
            drawn = []
            for ids, _, meta in loader:
                drawn.append((ids, meta))
                if len(drawn) == 4:
                    for ids, meta in reversed(drawn):
                        loader.observe(f(ids), meta=meta)
                        np.add.at(seen, ids.numpy(), 1)
                    drawn = []
            for ids, meta in drawn:
                loader.observe(f(ids), meta=meta)
                np.add.at(seen, ids.numpy(), 1)
        check(loader, seen)


def train(rank: int, name: str) -> Any:
    recipe = next(recipe for recipe in [*RECIPES, pruned] if recipe.name == name)
    seen = np.zeros(NUM, np.int64)
    lengths, orders = [], []
    with loader_of(recipe) as loader:
        for epoch in range(4):
            count = expected = 0
            for ids, _ in loader:
                expected = len(loader)  # exact once the epoch has begun
                loader.observe(f(ids))
                assert loader.weights.shape == ids.shape
                np.add.at(seen, ids.numpy(), 1)
                count += 1
            assert count == expected > 0
            lengths.append(count)
            orders.append(loader._session.controller.planner.identity(epoch))
            loader.end_epoch(accuracy=0.1 * epoch if rank == 0 else None)
        iter(loader)  # ranks agree when an epoch begins
        scores = loader.scores
        rows = {name: getattr(scores, name).tolist() for name in ("values", "seen", "accuracies")}
        return seen, lengths, orders, rows, scores.losses.tolist()


@pytest.mark.parametrize("name", ["any", "low", "pruned"])
def test_ranks_agree_with_equal_batches_per_rank(name: str, tmp_path: Path) -> None:
    """score_lands_on_the_served_sample: the table of both ranks is that of all samples served."""
    first, second = run_ranks(2, tmp_path, train, name)
    assert first[1] == second[1], "equal_batches_per_rank"
    assert (len(set(first[1])) > 1) == (name != "any"), "also where epochs differ in length"
    assert first[2:] == second[2:], "ranks_agree: on plans, scores and history"
    seen = first[0] + second[0]
    assert first[3]["seen"] == seen.tolist()
    expected = np.where(seen > 0, f(np.arange(NUM)).numpy(), 0)
    assert first[3]["values"] == expected.tolist()
    np.testing.assert_allclose(first[3]["accuracies"], [0, 0.1, 0.2, 0.3])
    assert np.isfinite(first[4]).all()


def test_substitute_embedding_under_its_own_id() -> None:
    """What is served for a sample by a key sample moves the key sample in the graph, not that."""
    pytest.importorskip("faiss", reason="faiss is not installed")

    def embeddings_of(ids: torch.Tensor) -> torch.Tensor:
        angles = ids.double() / 9
        return torch.stack([ids % 5, 3 * torch.cos(angles), 3 * torch.sin(angles)], dim=1).float()

    spider = recipes.spidercache(target_degree=8, start=0.5, end=0.5, parts="importance+homophily")
    asked = 0
    with loader_of(spider, num_workers=2, persistent_workers=True) as loader:
        for ids, targets in batches(loader, 5):
            assert targets.tolist() == ((ids.numpy() * 13) % 29).tolist()
            loader.observe(f(ids), embeddings=embeddings_of(ids), labels=ids % 3)
            asked += int((loader.last_outcomes == Outcome.SUBSTITUTED).sum())
        _ = loader.scores  # waits for the thread that scores
        known: Any = loader._session.controller.observer.scorer
        state = known.state_dict()
    assert asked > 20
    ids = torch.from_numpy(state["ids"].astype(np.int64))
    assert len(ids) == NUM
    np.testing.assert_array_equal(state["vectors"], embeddings_of(ids).numpy())
    np.testing.assert_array_equal(state["labels"], (ids % 3).numpy())


def disagree(rank: int) -> str:
    with loader_of("shade", seed=rank) as loader:
        try:
            next(iter(loader))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was said"


def test_ranks_that_made_different_plans_are_told(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, disagree):
        assert said.startswith("ConfigError: the ranks made different plans of epoch 0")


def test_ranks_that_cannot_agree_are_refused() -> None:
    from stoker.errors import ConfigError

    with (
        loader_of("shade", rank=0, world_size=2) as loader,
        pytest.raises(ConfigError, match="init_process_group"),
    ):
        next(iter(loader))


def test_hardest_samples_are_visited_and_kept() -> None:
    recipe = Recipe("weighted", "", Score(), sampler=part(WeightedSampler))
    visits = np.zeros(NUM)
    with loader_of(recipe) as loader:
        for epoch in range(8):
            for ids, _ in loader:
                loader.observe((ids < 30).double() + 0.01)
                np.add.at(visits, ids.numpy(), epoch > 0)
        cached: Any = loader.cache
        held = cached.store.tier.list("main")
    assert visits[:30].mean() > 10 * visits[30:].mean()
    assert set(range(30)) <= set(held.tolist())


def scored(history: Callable[[int], Any] = lambda _: LossHistory()) -> Recipe:
    return Recipe("scored", "", Score(), sampler=part(WeightedSampler), scorer=history)


def test_keys_follow_scores_at_once() -> None:
    with loader_of(scored(), cache="100%") as loader:
        cached: Any = None
        for ids, _ in loader:
            cached = loader.cache
            loader.observe(f(ids))
        arena = cached.store.tier.arena
        # The keys are not to be read out; what is evicted first says what they are.
        arena.resize_region("main", arena.stats()["payload_bytes"] // 3)
        held = cached.store.tier.list("main")
    losses = f(np.arange(NUM)).numpy()
    assert losses[held].min() >= np.sort(losses)[-len(held) - 3]


def test_s14_ties_favour_no_class() -> None:
    """As class folders are listed: the lower half of the ids is one class, the upper another."""
    recipe = Recipe("scored", "", Score(), scorer=lambda _: LossHistory())
    with loader_of(recipe, cache=Cache("50%", prefetch=0)) as loader:
        for _ in range(3):
            for ids, _ in loader:
                loader.observe(torch.ones(len(ids)))
        cached: Any = loader.cache
        held = cached.store.tier.list("main")
    assert abs((held < NUM // 2).mean() - 0.5) < 0.1
