"""What training may show that is of no use: every recipe trains on, and favours nobody by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pytorch.test_recipes_live import NUM, SMALL, loader_of, signals
from stoker import recipes
from stoker.errors import ConfigError
from stoker.pytorch import Loader

Show = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]

OPTIONS: dict[str, dict[str, Any]] = {
    "icache": {"warm_up": 1, **SMALL["icache"]},
    "impact": {"max_warm_up": 2, **SMALL["impact"]},
    "ilfu": {"warm_up": 1},
}
WITH_REPLACEMENT = {"shade", "spidercache"}


def epochs_of(name: str, show: Show | None) -> int:
    """Of 20 batches: a loop that shows nothing is told after 100, and draws leave some out."""
    return 7 if show is None or name in WITH_REPLACEMENT else 4


NAMES = ["shade", "icache", "impact", "spidercache", "ilfu", "infobatch", "base_cis", "quiver"]


def recipe_of(name: str, **more: Any) -> Any:
    if name == "spidercache":
        pytest.importorskip("faiss", reason="faiss is not installed")
    return getattr(recipes, name)(**{**OPTIONS.get(name, {}), **more})


def with_losses(values: Callable[[torch.Tensor], torch.Tensor]) -> Show:
    """All that recipes may need, with these losses; embeddings and logits are as useless."""

    def show(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        losses = values(ids)
        embeddings = losses[:, None].float().repeat(1, 3)
        logits = torch.zeros(len(ids), 4) + losses[:, None].float()
        return {"losses": losses, "logits": logits, "embeddings": embeddings, "labels": labels}

    return show


def one_class(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return signals(ids, torch.zeros_like(labels))


def run(
    name: str, show: Show | None, **more: Any
) -> tuple[np.ndarray[Any, Any], list[str], Loader]:
    """Train; return how often each sample was served by epoch, what was warned of, the loader."""
    rescore = (lambda batch: (show or signals)(*batch)["losses"]) if name == "impact" else None
    epochs = epochs_of(name, show)
    served = np.zeros((epochs, NUM), np.int64)
    with (
        warnings.catch_warnings(record=True) as told,
        loader_of(recipe_of(name, **more), rescore=rescore, batch_size=8, epochs=epochs) as loader,
    ):
        warnings.simplefilter("always")
        for epoch in range(epochs):
            for ids, labels in loader:
                assert (labels == ids % 4).all(), "label_matches_bytes"
                if show is not None:
                    loader.observe(**show(ids, labels))
                    assert torch.isfinite(loader.weights).all()
                np.add.at(served[epoch], ids.numpy(), 1)
            loader.end_epoch(accuracy=0.5)
        stats = loader.stats
    assert np.isfinite(loader.scores.values).all()
    parts = stats.hits + stats.substituted + stats.fetched + stats.packaged
    assert parts == stats.accesses == served.sum()
    assert (served.sum(axis=0) > 0).all(), "nobody is left out for good"
    if name not in WITH_REPLACEMENT:
        assert served.max() == 1
    return served, [str(warning.message) for warning in told], loader


def check_even(name: str, served: np.ndarray[Any, Any]) -> None:
    """Both halves of the ids, and even and odd ones, were visited alike, but for chance."""
    for first in (np.arange(NUM) < NUM // 2, np.arange(NUM) % 2 == 0):
        counts = served[:, first].sum(), served[:, ~first].sum()
        # Of draws with replacement, whose spread is the largest.
        assert abs(counts[0] - counts[1]) < 5 * np.sqrt(served.sum())
    if name in ("base_cis", "quiver"):
        assert (served == 1).all()


@pytest.mark.parametrize("value", [1.3, 0.0], ids=["all_scores_equal", "all_zero"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_that_tell_nobody_apart(name: str, value: float) -> None:
    show = with_losses(lambda ids: torch.full((len(ids),), value))
    more = {"parts": "importance"} if name == "spidercache" else {}
    served, told, loader = run(name, show, **more)
    check_even(name, served)
    assert not told
    assert (loader.scores.seen > 0).all()


def test_embeddings_that_are_all_the_same() -> None:
    """Everyone is everyone's neighbour, so that few stand in for all; the coverage says so."""
    alike = with_losses(lambda ids: torch.ones(len(ids)))
    served, _, loader = run("spidercache", alike, neighbor_max=500)
    assert served[0].max() == 1 and loader.stats.substituted > 0
    for epoch, stats in zip(served, loader.epoch_stats, strict=True):
        assert stats.coverage == pytest.approx((epoch > 0).mean())
        assert stats.ess == pytest.approx(epoch.sum() ** 2 / (epoch**2).sum() / NUM)
    assert loader.stats.coverage < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_losses_that_are_never_finite(name: str) -> None:
    served, told, loader = run(name, with_losses(lambda ids: torch.full((len(ids),), torch.nan)))
    assert (served == 1).all(), "uniform epochs"
    assert loader.scores.seen.sum() == 0
    assert sum("not finite" in message for message in told) == 1


@pytest.mark.parametrize("name", NAMES)
def test_some_nan_and_infinite_losses(name: str) -> None:
    """Those samples have no score and are visited as unseen ones are: not left out."""

    def some(ids: torch.Tensor) -> torch.Tensor:
        losses = ((ids * 37) % 101).float() / 50
        losses[ids % 5 == 0] = float("nan")
        losses[ids % 5 == 1] = float("inf")
        return losses

    served, told, loader = run(name, with_losses(some))
    bad = np.arange(NUM) % 5 < 2
    assert loader.scores.seen[bad].sum() == 0 and (loader.scores.seen[~bad] > 0).all()
    assert sum("not finite" in message for message in told) == 1
    mean = served.sum(axis=0)
    assert mean[bad].mean() > 0.6 * mean[~bad].mean()


@pytest.mark.parametrize("name", NAMES)
def test_one_class_only(name: str) -> None:
    _, told, loader = run(name, one_class)
    assert not told
    assert (loader.scores.seen > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_that_never_calls_observe(name: str) -> None:
    served, told, _ = run(name, None)
    assert (served == 1).all(), "uniform epochs"
    expected = 0 if name in ("base_cis", "quiver") else 1
    assert sum("100 batches came without" in message for message in told) == expected


def test_labels_missing_for_the_graph() -> None:
    def no_labels(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        shown = signals(ids, labels)
        return {"losses": shown["losses"], "embeddings": shown["embeddings"]}

    served, told, _ = run("spidercache", no_labels)
    assert (served == 1).all(), "uniform epochs"
    assert sum("needs labels" in message for message in told) == 1


def test_embeddings_of_changing_dimension() -> None:
    with loader_of(recipe_of("spidercache")) as loader:
        for _ in range(2):
            for step, (ids, labels) in enumerate(loader):
                shown = signals(ids, labels)
                if step == 3:
                    wider = torch.cat([shown["embeddings"]] * 2, dim=1)
                    with pytest.raises(ConfigError, match="dimension 6, and before of 3"):
                        loader.observe(shown["losses"], embeddings=wider, labels=labels)
                loader.observe(**shown)
            loader.end_epoch(accuracy=0.5)


def test_a_batch_smaller_than_k_neighbours() -> None:
    """The paper's 500 are asked for: of batches of 8, and of 160 samples in all."""
    _, told, loader = run("spidercache", signals, neighbor_max=500)
    assert not told
    assert len(np.unique(loader.scores.values)) > 10


@pytest.mark.parametrize("name", ["icache", "impact"])
def test_fewer_samples_than_one_package(name: str) -> None:
    """All samples have 10 KB and a package 1 MiB: refused where L cannot hold them all."""
    warm_up = {"warm_up": 1} | ({"max_warm_up": 2} if name == "impact" else {})
    recipe = getattr(recipes, name)(**warm_up, package_bytes=1 << 20)
    # A quarter of ImPACT's cache is for volatile samples: L never has room for all.
    cache = "40%" if name == "icache" else "100%"
    rescore = (lambda batch: signals(*batch)["losses"]) if name == "impact" else None
    with pytest.raises(ConfigError, match="no room for a package"):
        loader_of(recipe, cache=cache, rescore=rescore)
    if name == "icache":
        visit_once_each(loader_of(recipe, cache="100%"))


@pytest.mark.parametrize("name", ["icache", "impact"])
def test_newcomer_3_packages_shrink_with_the_cache(name: str) -> None:
    rescore = (lambda batch: signals(*batch)["losses"]) if name == "impact" else None
    warm_up = {"warm_up": 1} | ({"max_warm_up": 2} if name == "impact" else {})
    loader = loader_of(getattr(recipes, name)(**warm_up), cache="40%", rescore=rescore)
    setup = loader._session.setup
    assert setup.recipe.packaging is not None
    assert setup.recipe.packaging.min_bytes == setup.capacity // 20
    visit_once_each(loader)


def visit_once_each(loader: Loader) -> None:
    """Train for 6 epochs, in none of which a sample may come twice."""
    with loader:
        for _ in range(6):
            served = np.zeros(NUM, np.int64)
            for ids, labels in loader:
                assert (labels == ids % 4).all()
                loader.observe(**signals(ids, labels))
                np.add.at(served, ids.numpy(), 1)
            assert served.max() == 1
