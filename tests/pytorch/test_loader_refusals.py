"""Bad input is refused at construction, by an error that names the value and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.caches import gathered
from support.parts import Squares, images, number_of, numbers
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, Subset

from stoker import Cache, recipes
from stoker.errors import CapacityError, ConfigError
from stoker.plan import Plan
from stoker.policy.baselines import MinIO
from stoker.pytorch import Loader, SampleDataset, with_cache
from stoker.recipes import Recipe
from stoker.source import MemorySource


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class _Other(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return "something else"

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return ["something else"] * len(indices)


def samples() -> SampleDataset:
    return SampleDataset(numbers(20), number_of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "120%"}, "cache='120%' is more than the whole data set"),
        ({"cache": "-1GiB"}, "cache='-1GiB' is not a size"),
        ({"cache": -1}, "cache=-1 is not a size"),
        ({"cache": 5}, "cache=5 is 5 bytes and the largest sample has 14"),
        ({"cache": "2%"}, "largest sample"),
        ({"stage": "raw"}, "stage='raw'"),
        ({"recipe": "magic"}, "recipe 'magic' is not known: use one of"),
        ({"recipe": 7}, "recipe=7 is neither"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"generator": torch.Generator().manual_seed(7)}, "give seed=7 in its place"),
        ({"rank": 2, "world_size": 2}, "rank=2 is out of range"),
        ({"on_error": 3}, "on_error=3"),
        ({"disk": "/usr"}, "is not empty and not Stoker's"),
        ({"disk_size": "1GiB"}, "give disk too"),
        ({"rescore": print}, "of no use to recipe 'foresight'"),
        ({"rescore": 3}, "rescore=3 is no function"),
        ({"prefetch": "-1MiB"}, "prefetch='-1MiB' is not a size"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(samples(), **gathered(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"shuffle": True, "sampler": [1, 2]}, "mutually exclusive"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
        ({"batch_size": 4, "batch_sampler": [[1]]}, "mutually exclusive"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_what_torch_refuses_is_refused_as_torch_does(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(samples(), **arguments)


def test_a_word_that_nobody_knows() -> None:
    with pytest.raises(TypeError, match="cash"):
        Loader(samples(), cash="20%")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (_Stream(), "tar shards"),
        (Squares(), r"stoker.wrap\(dataset\)"),
        (Subset(samples(), []), "0 samples"),
        (Subset(samples(), [3, 20]), "from 3 to 20"),
        (_Other(samples(), [1]), "_Other is not a Stoker data set"),
        ([1, 2, 3], "list is not a Stoker data set"),
    ],
)
def test_data_sets(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(dataset)


def test_recipes_that_draw_samples_want_no_sampler() -> None:
    class Ones:
        uses_scores = False

        def __init__(self, num_samples: int, **_: Any) -> None:
            self.longest = num_samples

        def length_at(self, epoch: int, scores: Any = None) -> int:
            return self.longest

        def plan(self, scores: Any, epoch: int) -> Plan:
            weights = np.linspace(0, 2, self.longest, dtype=np.float32)
            return Plan(epoch, epoch * self.longest, np.ones(self.longest, np.uint32), weights)

    recipe = Recipe("ones", "draws sample 1 only", MinIO(), sampler=Ones)
    with pytest.raises(ConfigError, match="'ones' draws samples itself"):
        Loader(samples(), sampler=[1, 2], recipe=recipe)
    with pytest.raises(ConfigError, match="'ones' draws samples itself"):
        Loader(
            samples(),
            batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False),
            recipe=recipe,
        )
    # By itself it supplies ids and weights.
    with Loader(samples(), batch_size=10, recipe=recipe, cache=0) as loader:
        weights = []
        for batch in loader:
            assert batch.tolist() == [1] * 10
            loader.observe(torch.ones(10))
            weights += loader.weights.tolist()
        np.testing.assert_allclose(weights, np.linspace(0, 2, 20), rtol=1e-6)
        assert loader.stats.coverage == loader.stats.ess == 1 / 20
    with Loader(samples(), batch_size=10, recipe=recipe, shuffle=False, cache=0) as loader:
        assert [i for batch in loader for i in batch.tolist()] == list(range(20))


def test_recipes_that_look_ahead_want_a_plan() -> None:
    with pytest.raises(ConfigError, match="'belady' needs a plan"):
        Loader(samples(), sampler=[1, 2], recipe="belady")
    with pytest.raises(ConfigError, match="'belady' needs a plan"):
        with_cache(samples(), recipe="belady")


@pytest.mark.filterwarnings("ignore:the recipe goes by validation accuracy")
def test_every_recipe_serves_every_sample() -> None:
    plain = [recipe for recipe in map(recipes.get, recipes.names()) if not recipe.substitution]
    for recipe in plain:
        with Loader(samples(), batch_size=4, cache="60%", recipe=recipe, epochs=3) as loader:
            for _ in range(3):
                assert sorted(i for batch in loader for i in batch.tolist()) == list(range(20))
            assert loader.stats.accesses == 60


def test_more_memory_than_there_is_comes_with_the_first_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stoker.epoch import setup

    def no_memory(*_: Any, **__: Any) -> Any:
        raise CapacityError("14 bytes asked for, 3 there")

    monkeypatch.setattr(setup, "open_arena", no_memory)
    loader = Loader(samples())
    with pytest.raises(CapacityError, match="3 there"):
        iter(loader)


def test_no_more_is_reserved_than_the_samples_need(image_root: Path) -> None:
    dataset = images(image_root)
    cache = Cache("64GiB", stands_aside=False)
    with Loader(dataset, batch_size=10, cache=cache) as loader:
        for _ in range(2):
            list(loader)
        assert loader.epoch_stats[1].hit_ratio == 1
        capacity = loader.cache.store.tier.stats()["capacity_bytes"]  # type: ignore[union-attr]
        assert capacity < 1 << 20


def test_samples_of_unequal_size_in_a_small_cache() -> None:
    rng = np.random.default_rng(0)
    source = MemorySource([rng.bytes(int(n)) for n in rng.integers(1, 4000, 200)])
    with Loader(SampleDataset(source, len), batch_size=16, cache=4000) as loader:
        for _ in range(3):
            sizes = sorted(i for batch in loader for i in batch.tolist())
            assert sizes == sorted(source.sizes.tolist())
        assert loader.stats.cache_bytes <= 4000


def test_s15_a_step_that_could_have_a_sample_twice_is_refused() -> None:
    """Of 100 samples, with steps of 8 or 16."""
    from support.parts import number_of, numbers

    dataset = SampleDataset(numbers(100), number_of)
    with pytest.raises(ConfigError, match=r"has 8 samples.*after 7 accesses.*longer window="):
        Loader(dataset, batch_size=8, recipe=recipes.foresight(repeat=4, window=0.3))
    wide = recipes.foresight(repeat=4, window=1.0)
    with pytest.raises(ConfigError, match="has 16 samples"):
        Loader(dataset, batch_size=8, recipe=wide, rank=0, world_size=2)
    Loader(dataset, batch_size=8, recipe=wide).close()
