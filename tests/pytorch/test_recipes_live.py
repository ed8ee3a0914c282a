"""The recipes that follow scores, as they come, in training loops of a few small epochs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of
from support.ranks import run_ranks

from stoker import recipes
from stoker.errors import StateMismatch
from stoker.importance.hybrid import Hybrid
from stoker.pytorch import Loader, SampleDataset
from stoker.source import FileSource, MemorySource
from stoker.types import Outcome

NUM = 160


def source_of(size: int = 64) -> MemorySource:
    return MemorySource([f"{i:08}".encode().ljust(size, b".") for i in range(NUM)])


def loader_of(recipe: Any, source: Any = None, **options: Any) -> Loader:
    dataset = SampleDataset(source or source_of(), number_of, targets=np.arange(NUM) % 4)
    defaults: dict[str, Any] = {"batch_size": 16, "cache": "40%", "epochs": 10}
    return Loader(dataset, recipe=recipe, **{**defaults, **options})


def signals(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Losses, logits, embeddings and labels that depend on the sample alone."""
    values = ((ids * 37) % 101).float()
    logits = torch.nn.functional.one_hot(labels, 4) * (1 + values[:, None] / 50)
    angle = values[:, None] / 16
    embeddings = torch.cat([torch.cos(angle), torch.sin(angle), labels[:, None].float()], dim=1)
    return {"losses": values / 50, "logits": logits, "embeddings": embeddings, "labels": labels}


def train(loader: Loader, epochs: int) -> np.ndarray[Any, Any]:
    served = np.zeros((epochs, NUM), np.int64)
    for epoch in range(epochs):
        for ids, labels in loader:
            assert (labels == ids % 4).all()
            assert loader.last_ids.tolist() == ids.tolist()
            loader.observe(**signals(ids, labels))
            np.add.at(served[epoch], ids.numpy(), 1)
        loader.end_epoch(accuracy=0.5 + epoch / 100)
    return served


SMALL: dict[str, dict[str, Any]] = {
    "icache": {"package_bytes": 512},
    "impact": {"package_bytes": 512},
    "foresight": {"importance": True, "repeat": 3},
}
NAMES = ["shade", "icache", "impact", "spidercache", "quiver", "base_cis", "ilfu", "infobatch"]
NAMES += ["foresight"]


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [(name, 0) for name in NAMES] + [(name, 2) for name in ("icache", "impact", "spidercache")],
)
def test_every_recipe_trains(name: str, num_workers: int) -> None:
    if name == "spidercache":
        pytest.importorskip("faiss", reason="faiss is not installed")
    recipe = getattr(recipes, name)(**SMALL.get(name, {}))
    rescore = (lambda batch: signals(*batch)["losses"]) if name == "impact" else None
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    with loader_of(recipe, rescore=rescore, **workers) as loader:
        expected = loader.total_steps()
        served = train(loader, 10)
        stats = loader.stats
        scores = loader.scores
        assert (scores.seen >= served.sum(axis=0)).all()
    parts = stats.hits + stats.substituted + stats.fetched + stats.packaged
    assert stats.accesses == parts == served.sum()
    assert stats.scoring_seconds > 0 and 0 < stats.ess <= 1 and 0 < stats.coverage <= 1
    assert bool(stats.rescored) == (name == "impact")
    assert stats.hits + stats.substituted > 0
    assert served[0].sum() == NUM, "a full pass until there is something to go by"
    if name in ("icache", "impact", "quiver", "ilfu", "infobatch"):
        assert served.max() <= 1, "substitute_never_served_twice_an_epoch"
    assert len(loader.epoch_stats) == 10 and expected >= 10


@pytest.mark.parametrize(("batch_size", "share"), [(2, 4 / 64), (16, 0.1)])
def test_spidercache_has_room_for_the_batches_on_their_way(batch_size: int, share: float) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    options = {"batch_size": batch_size, "cache": "40%", "num_workers": 0}
    with loader_of("spidercache", **options) as loader:
        train(loader, 2)
        regions = loader.cache.store.tier.arena.stats()["regions"]  # type: ignore[union-attr]
        told = sum(regions[name]["budget"] for name in ("importance", "homophily", "transit"))
        assert regions["transit"]["budget"] / told == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("parts", ["iip", "iip+lfu"])
def test_impact_over_plain_caches_scores_again_and_keeps_nothing_for_it(parts: str) -> None:
    recipe = recipes.impact(max_warm_up=2, parts=parts)
    with loader_of(recipe, rescore=lambda batch: signals(*batch)["losses"]) as loader:
        assert train(loader, 6).max() == 1
        assert loader.stats.rescored > 0
        arena = loader.cache.store.tier.arena  # type: ignore[union-attr]
        assert not {"H", "L", "S"} & arena.stats()["regions"].keys()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_st_hc_has_high_samples_stand_in_and_come_more_often(num_workers: int) -> None:
    recipe = recipes.icache(substitute="high", split="moving", warm_up=1, package_bytes=512)
    with loader_of(recipe, num_workers=num_workers) as loader:
        served = train(loader, 6)
        stats = loader.stats
    assert stats.substituted > 0 and served.max() > 1
    assert stats.accesses == served.sum()


@pytest.mark.parametrize("evaluation", ["hybrid", "realtime"])
def test_s8_without_rescore_nothing_is_reserved_for_it_and_that_is_said(evaluation: str) -> None:
    options = {"parts": "iis+hc", "warm_up": 1}
    recipe = recipes.impact(evaluation=evaluation, **options)
    with pytest.warns(RuntimeWarning, match=r"'impact' rescores samples .* Give the Loader resc"):
        loader = loader_of(recipe)
    with loader, loader_of(recipes.impact(evaluation="history", **options)) as plain:
        assert (train(loader, 4) == train(plain, 4)).all()
        assert loader.epoch_stats[-1].hits == plain.epoch_stats[-1].hits
        arena = loader.cache.store.tier.arena  # type: ignore[union-attr]
        assert "S" not in arena.stats()["regions"]


def test_s8_a_scorer_of_ones_own_that_scores_anew_asks_for_rescore() -> None:
    recipe = replace(recipes.get("shade"), scorer=lambda n: Hybrid(n))
    with pytest.warns(RuntimeWarning, match=r"Give the Loader rescore="), loader_of(recipe):
        pass
    with loader_of(recipe, rescore=lambda batch: batch[0].float()):
        pass


def test_s8_a_run_that_scored_anew_does_not_go_on_without() -> None:
    recipe = recipes.impact(max_warm_up=2, parts="iis+hc")
    with loader_of(recipe, rescore=lambda batch: signals(*batch)["losses"]) as loader:
        train(loader, 3)
        state = loader.state_dict()
    with pytest.warns(RuntimeWarning, match="rescore"):
        loader = loader_of(recipe)
    with loader, pytest.raises(StateMismatch, match="make the loader as it was"):
        loader.load_state_dict(state)


def test_low_samples_come_in_packages(tmp_path: Path) -> None:
    """label_matches_bytes and l_cache through the loader, with the packaging process at work."""
    for number in range(NUM):
        (tmp_path / f"{number:04}").write_bytes(f"{number:08}".encode().ljust(256, b"."))
    source = FileSource(sorted(tmp_path.iterdir()))
    recipe = recipes.icache(package_bytes=2048, warm_up=1)
    options = {"num_workers": 2, "persistent_workers": True, "epochs": None}
    deadline = time.monotonic() + 120  # a busy machine starts the process late
    with loader_of(recipe, source, cache="50%", **options) as loader:
        while loader.stats.packaged == 0 and time.monotonic() < deadline:
            assert train(loader, 3).max() <= 1
        stats = loader.stats
    assert stats.packaged > 0
    assert stats.packages_built >= 1 and stats.package_reads >= 1


def rescored(rank: int) -> Any:
    calls: list[int] = []

    def rescore(batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        return signals(*batch)["losses"]  # type: ignore[no-any-return]

    recipe = recipes.impact(evaluation="realtime", parts="iis+hc", warm_up=1)
    with loader_of(recipe, rescore=rescore) as loader:
        train(loader, 3)
        loader.set_epoch(3)
        iter(loader)
        scores = loader.scores
        return calls, loader.stats.rescored, scores.values.tolist(), scores.seen.tolist()


def test_ranks_divide_what_is_scored_anew(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, rescored)
    assert first[0] == second[0] == [16] * 5 * 3, "equally many forward passes"
    assert first[1] == second[1] == NUM // 2 * 3
    assert first[2:] == second[2:], "ranks_agree"


def outcomes_of(rank: int, name: str) -> Any:
    recipe = getattr(recipes, name)(**SMALL.get(name, {}))
    served = np.zeros((6, NUM), np.int64)
    substituted = 0
    # torch.distributed has been initialized, so the ranks find each other by themselves.
    with loader_of(recipe) as loader:
        for epoch in range(6):
            for ids, labels in loader:
                loader.observe(**signals(ids, labels))
                np.add.at(served[epoch], ids.numpy(), 1)
                substituted += int((loader.last_outcomes == Outcome.SUBSTITUTED).sum())
    return served, substituted


@pytest.mark.parametrize("name", ["quiver", "icache"])
def test_ranks_claim_substitutes_together(name: str, tmp_path: Path) -> None:
    """substitute_never_served_twice_an_epoch, over two ranks."""
    found = run_ranks(2, tmp_path, outcomes_of, name)
    served = found[0][0] + found[1][0]
    assert served.max() <= 1
    if name == "quiver":
        assert sum(part[1] for part in found) > 0
