"""Loops that do not play their part: told once, and trained on uniform epochs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers

from stoker.errors import ConfigError
from stoker.importance.base import Observation
from stoker.policy.score import Score
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.baselines import InfoBatchSampler, WeightedSampler

NUM = 240


def loader_of(recipe: Any, **options: Any) -> Loader:
    dataset = SampleDataset(numbers(NUM), number_of, targets=np.arange(NUM) % 4)
    return Loader(dataset, **{"batch_size": 4, "cache": 0, "epochs": 8, "recipe": recipe} | options)


weighted = Recipe("weighted", "", Score(), sampler=part(WeightedSampler))
pruned = Recipe("pruned", "", Score(), sampler=part(InfoBatchSampler))


class ByEmbedding:
    """Scores by the first number of an embedding."""

    needs = frozenset({"embeddings", "labels"})

    def update(self, scores: Any, observation: Observation) -> None:
        vectors = observation.signal("embeddings")
        assert vectors.dtype == np.float32
        assert observation.signal("labels").dtype == np.int64
        scores.update(observation.ids, vectors[:, 0], observation.step)


by_embedding = Recipe(
    "by_embedding", "", Score(), sampler=part(WeightedSampler), scorer=lambda _: ByEmbedding()
)


def epoch_of(loader: Loader) -> list[int]:
    return sorted(i for ids, _ in loader for i in ids.tolist())


def test_a_loop_that_never_calls_observe() -> None:
    with loader_of(weighted) as loader:
        assert epoch_of(loader) == list(range(NUM))
        with pytest.warns(
            RuntimeWarning, match="needs losses, and 100 batches came without"
        ) as told:
            assert epoch_of(loader) == list(range(NUM))
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            assert epoch_of(loader) == list(range(NUM))


def test_plain_recipes_need_nothing() -> None:
    with loader_of("minio") as loader:
        for _ in range(4):
            assert epoch_of(loader) == list(range(NUM))


def test_a_loop_that_gives_losses_where_embeddings_are_needed() -> None:
    with loader_of(by_embedding) as loader:
        with pytest.warns(RuntimeWarning, match="needs embeddings or labels"):
            for _ in range(2):
                for ids, _ in loader:
                    loader.observe(ids.float())
        assert epoch_of(loader) == list(range(NUM))
        assert loader.scores.seen.sum() == 0
        assert np.isfinite(loader.scores.losses).all(), "the history has the losses all the same"


def test_a_loop_that_stops_observing_goes_back_to_uniform_epochs() -> None:
    with loader_of(weighted) as loader:
        for ids, _ in loader:
            loader.observe((ids < 10).double() + 1e-3)
        assert epoch_of(loader) != list(range(NUM))
        with pytest.warns(RuntimeWarning, match="100 batches came without"):
            epoch_of(loader)
        assert epoch_of(loader) == list(range(NUM))


def test_a_loop_that_leaves_weights_alone() -> None:
    with loader_of(pruned) as loader:

        def train() -> list[int]:
            served: list[int] = []
            for ids, _ in loader:
                loader.observe(ids.double())
                served += ids.tolist()
            return sorted(served)

        assert train() == list(range(NUM))
        with pytest.warns(RuntimeWarning, match=r"loader.weights or meta.weights") as told:
            lengths = [len(train()) for _ in range(3)]
        assert len(told) == 1
        # 45 batches an epoch: the warning comes in the third pruned one, the next is uniform.
        assert all(length < NUM for length in lengths)
        assert train() == list(range(NUM))


def test_a_loop_that_uses_weights_is_left_alone() -> None:
    with loader_of(pruned) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            for ids, _ in loader:
                loader.observe(ids.double())
                assert loader.weights.shape == (len(ids),)
        assert loader.stats.accesses < 6 * NUM


def test_embeddings_of_another_dimension_are_refused() -> None:
    with loader_of(by_embedding) as loader:
        iterator = iter(loader)
        ids, labels = next(iterator)
        loader.observe(embeddings=torch.randn(4, 8, dtype=torch.bfloat16), labels=labels)
        assert (loader.scores.seen[ids.numpy()] == 1).all()
        _, labels = next(iterator)
        with pytest.raises(ConfigError, match="dimension 9, and before of 8"):
            loader.observe(embeddings=torch.randn(4, 9), labels=labels)
        with pytest.raises(ConfigError, match=r"embeddings of shape \[4, 2, 4\]"):
            loader.observe(embeddings=torch.randn(4, 2, 4), labels=labels)
        with pytest.raises(ConfigError, match="one class number per sample"):
            loader.observe(embeddings=torch.randn(4, 8), labels=torch.rand(4, 4))
        loader.observe(embeddings=torch.randn(4, 8), labels=labels)


def test_embeddings_that_are_not_finite_keep_the_old_score() -> None:
    with loader_of(by_embedding) as loader:
        ids, labels = next(iter(loader))
        vectors = torch.ones(4, 8)
        vectors[1, 3] = float("nan")
        with pytest.warns(RuntimeWarning, match="not finite"):
            loader.observe(embeddings=vectors, labels=labels)
        assert loader.scores.seen[ids.numpy()].tolist() == [1, 0, 1, 1]
        assert loader.stats.non_finite == 1


def test_losses_that_are_all_equal_or_not_finite_do_no_harm() -> None:
    for value in (0.0, 1.0, float("nan")):
        with loader_of(weighted) as loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                count = 0
                for ids, _ in loader:
                    loader.observe(torch.full((len(ids),), value))
                    count += len(ids)
                assert count == NUM


def test_gradient_norms_are_those_of_autograd() -> None:
    from stoker.pytorch.observe import gradient_norms, per_sample_loss

    for shape in ((6,), (6, 5)):
        logits = torch.randn(*shape, 7, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(7, shape)
        if len(shape) == 2:
            labels[0, 1:3] = -100
        (gradient,) = torch.autograd.grad(per_sample_loss(logits, labels).sum(), logits)
        expected = gradient.reshape(6, -1).norm(dim=1)
        torch.testing.assert_close(gradient_norms(logits.detach(), labels), expected)
