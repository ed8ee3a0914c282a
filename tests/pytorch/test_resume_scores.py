"""Resume where plans depend on scores: exactly, from any step, with other workers and ranks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers

from pytorch.test_recipes_live import signals
from stoker import recipes
from stoker.errors import StateMismatch
from stoker.policy.base import Substitution
from stoker.policy.score import HighLow, Score
from stoker.policy.shares import FrequencySplit
from stoker.pytorch import Loader, SampleDataset
from stoker.recipes import Recipe
from stoker.recipes.base import part
from stoker.sampler.baselines import InfoBatchSampler, SelectiveSampler
from stoker.sampler.pads import PadsSampler

NUM, EPOCHS = 90, 5

RECIPES = [
    Recipe("pads", "", Score(), sampler=part(PadsSampler)),
    Recipe("infobatch", "", Score(), sampler=part(InfoBatchSampler)),
    Recipe("selective", "", Score(), sampler=part(SelectiveSampler, warm_up=1, reweight=True)),
    recipes.impact(parts="iis+hc", max_warm_up=2),
    recipes.foresight(importance=True, repeat=3, annealed=0.0),
]


def loader_of(recipe: Any, **options: Any) -> Loader:
    dataset = SampleDataset(numbers(NUM), number_of, targets=np.arange(NUM) % 4)
    defaults: dict[str, Any] = {"cache": "40%", "epochs": EPOCHS, "return_meta": True}
    return Loader(dataset, 8, recipe=recipe, **{**defaults, **options})


def rescorer(recipe: Recipe) -> Any:
    return (lambda batch: signals(*batch[:2])["losses"]) if recipe.name == "impact" else None


class Run:
    """A training that can be stopped after any step; its losses change from step to step."""

    def __init__(self, loader: Loader, step: int = 0) -> None:
        self.loader, self.step = loader, step
        self.batches: list[tuple[int, list[int], list[float]]] = []
        self.plans: dict[int, list[int]] = {}
        self.high: dict[int, list[int]] = {}

    def go(self, stop: int | None = None) -> Any:
        """Train to the end, or return a state after ``stop`` steps of this run."""
        epoch = self.loader._session.controller.share.coming.epoch
        while epoch < EPOCHS:
            for ids, _, meta in self.loader:
                losses = ((ids * 37 + self.step * 11) % 101).double() / 50
                self.batches.append((meta.epoch, ids.tolist(), meta.weights.tolist()))
                if meta.epoch not in self.plans:
                    self.note_plan(meta.epoch)
                self.loader.observe(losses, meta=meta)
                self.step += 1
                if len(self.batches) == stop:
                    return self.loader.state_dict()
            self.loader.end_epoch(accuracy=0.5 + epoch / 50)
            epoch += 1
        return None

    def note_plan(self, epoch: int) -> None:
        """Note what the epoch is to serve, and which of it nothing else may stand in for."""
        self.plans[epoch] = self.loader._session.controller.planner.whole(epoch).ids.tolist()
        session: Any = self.loader._session
        places = session.cached.store.places
        if places is not None:
            self.high[epoch] = np.flatnonzero(places.array != HighLow.LOW).tolist()


def reloaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_plan_made_from_scores_goes_on_exactly(recipe: Recipe) -> None:
    with loader_of(recipe, rescore=rescorer(recipe)) as loader:
        whole = Run(loader)
        whole.go()
        expected = loader.scores
    total = len(whole.batches)
    starts = [n for n in range(1, total) if whole.batches[n][0] != whole.batches[n - 1][0]]
    # Within the first epoch, at the end of one, in the first step of one, in the middle.
    for stops in ((3, starts[0] - 1), (starts[1],), (starts[1] + 1, 4), (starts[2] + 5, 2)):
        done: list[Any] = []
        state = None
        for stop in (*stops, None):
            with loader_of(recipe, rescore=rescorer(recipe)) as loader:
                if state is not None:
                    loader.load_state_dict(reloaded(state))
                run = Run(loader, step=len(done))
                state = run.go(stop)
                done += run.batches
                scores = loader.scores
        assert done == whole.batches
        for name in ("values", "seen", "accuracies", "losses", "deviations"):
            np.testing.assert_allclose(getattr(scores, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("workers", [0, 2])
def test_with_other_workers(recipe: Recipe, workers: int) -> None:
    with loader_of(recipe) as loader:
        whole = Run(loader)
        whole.go()
    with loader_of(recipe, num_workers=2 - workers) as loader:
        first = Run(loader)
        state = first.go(20)
    with loader_of(recipe, num_workers=workers) as loader:
        loader.load_state_dict(reloaded(state))
        rest = Run(loader, 20)
        rest.go()
    assert first.batches + rest.batches == whole.batches


def test_the_running_epoch_is_finished_by_another_number_of_ranks() -> None:
    """Their losses would have to be exchanged, so one process asks each rank for its part."""
    recipe = RECIPES[2]
    with loader_of(recipe) as loader:
        run = Run(loader)
        state = reloaded(run.go(25))
        epoch = run.batches[-1][0]
        before = [i for e, ids, _ in run.batches for i in ids if e == epoch]
        plan = loader._session.controller.planner.whole(epoch).ids.tolist()
    assert 0 < len(before) < len(plan) < NUM
    rest: list[int] = []
    for rank in range(2):
        with loader_of(recipe, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            rest += list(loader.sampler)
    assert sorted(set(before + rest)) == sorted(set(plan))
    assert len(before + rest) - len(plan) in (0, 1)  # filled up for two


SUBSTITUTING = [
    recipes.icache(warm_up=1, full_every=3, package_bytes=64),
    recipes.impact(max_warm_up=2, package_bytes=64),
    Recipe(
        "low",
        "",
        HighLow(0.5, 0.5),
        sampler=part(SelectiveSampler, warm_up=1, full_every=0),
        shares=FrequencySplit(start=0.5),
        substitution=Substitution("low_by_low", "L"),
    ),
]


ST_HC = recipes.icache(substitute="high", warm_up=1, package_bytes=64)


@pytest.mark.parametrize(
    ("recipe", "is_once_each"),
    [*((recipe, True) for recipe in SUBSTITUTING), (ST_HC, False)],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_s1_resume_with_substitution(recipe: Recipe, is_once_each: bool) -> None:
    """Each sample once an epoch: those that matter as planned, of the others as many.

    Where those that matter stand in, they come besides as planned.
    """
    served: list[list[int]] = [[] for _ in range(EPOCHS)]
    plans: dict[int, list[int]] = {}
    high: dict[int, list[int]] = {}
    state, steps, substituted, workers = None, 0, 0, 0
    while steps == 0 or state is not None:
        with loader_of(recipe, rescore=rescorer(recipe), num_workers=workers) as loader:
            if state is not None:
                loader.load_state_dict(reloaded(state))
            run = Run(loader, steps)
            state = run.go(13)
            substituted += loader.stats.substituted
            steps += len(run.batches)
            for epoch, ids, _ in run.batches:
                served[epoch] += ids
            for epoch, plan in run.plans.items():
                assert plans.setdefault(epoch, plan) == plan
            high |= run.high
        workers = 2 - workers
    assert substituted
    for epoch, ids in enumerate(served):
        assert len(ids) == len(plans[epoch])
        assert not is_once_each or len(set(ids)) == len(ids)
        assert set(ids) >= set(plans[epoch]) & set(high[epoch])


def test_what_a_plan_was_made_from_is_part_of_it() -> None:
    with loader_of(RECIPES[2]) as loader:
        state = Run(loader).go(25)
    with loader_of(RECIPES[0]) as loader, pytest.raises(StateMismatch, match="order"):
        loader.load_state_dict(state)
    with loader_of(RECIPES[2], seed=1) as loader, pytest.raises(StateMismatch, match="seed"):
        loader.load_state_dict(state)


def test_a_rank_leaves_to_another_what_that_one_observed() -> None:
    """Or the observations of the rank whose state all load would count once for each of them."""
    from stoker.epoch.state import RankState
    from stoker.pytorch.torch_session import array_of

    with loader_of(RECIPES[2]) as loader:
        state = reloaded(Run(loader).go(25))
    agreed = RankState.from_dict(state, array_of).agreed
    assert agreed is not None
    with loader_of(RECIPES[2], rank=0, world_size=2) as loader:
        loader.load_state_dict(state)
        assert loader.scores.seen.sum() > agreed["seen"].sum()
    with loader_of(RECIPES[2], rank=1, world_size=2) as loader:
        loader.load_state_dict(state)
        np.testing.assert_array_equal(loader.scores.seen, agreed["seen"])
