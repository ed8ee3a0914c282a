"""DistributedImportanceSampler with torch's own DataLoader: no cache, no loader of Stoker's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from stoker.errors import ConfigError, StateMismatch
from stoker.pytorch import DistributedImportanceSampler, WithIds
from stoker.scores import Scores

N = 61
RNG = np.random.default_rng(3)
GRADIENTS = RNG.normal(size=(N, 4))
LOSSES = np.abs(GRADIENTS[:, 0])
GRADIENTS += LOSSES[:, None]  # what is drawn often pulls one way


def sampler_of(weights: Any = None, **arguments: Any) -> DistributedImportanceSampler:
    return DistributedImportanceSampler(range(N), weights, **arguments)


def epoch_of(world_size: int, weights: Any = None, epoch: int = 0, **arguments: Any) -> list[Any]:
    parts = []
    for rank in range(world_size):
        sampler = sampler_of(weights, num_replicas=world_size, rank=rank, **arguments)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler)
    return parts


# --- unbiased ---


def deviation(weighted: bool, **arguments: Any) -> float:
    """How many standard errors the mean gradient over epochs of two ranks is off, at most."""
    ranks = [sampler_of(LOSSES, num_replicas=2, rank=rank, **arguments) for rank in range(2)]
    rows = []
    for _ in range(400):
        total, count = np.zeros(4), 0
        for sampler in ranks:
            ids = np.fromiter(sampler, np.int64)
            weights = sampler.weights_of(ids).numpy() if weighted else np.ones(len(ids))
            total += weights @ GRADIENTS[ids]
            count += len(ids)
        rows.append(total / count)
    means = np.array(rows)
    error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
    return float((np.abs(means.mean(axis=0) - GRADIENTS.mean(axis=0)) / error).max())


@pytest.mark.parametrize(
    "arguments", [{}, {"draws": 30, "replacement": False}], ids=["replaced", "distinct"]
)
def test_weighted_gradients_have_the_full_one_as_their_mean(arguments: Any) -> None:
    assert deviation(True, **arguments) < 4
    assert deviation(False, **arguments) > 10, "a biased draw must be seen"


# --- lengths and plans ---


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 7),
    draws=st.none() | st.integers(1, 150),
    drop_last=st.booleans(),
    known=st.booleans(),
)
def test_ranks_get_equally_many_parts_of_one_plan(
    world_size: int, draws: int | None, drop_last: bool, known: bool
) -> None:
    size = N if draws is None else draws
    weights = LOSSES if known else None
    if drop_last and size < world_size:
        with pytest.raises(ConfigError, match="drop_last leaves none"):
            epoch_of(world_size, weights, draws=draws, drop_last=True)
        return
    parts = epoch_of(world_size, weights, draws=draws, drop_last=drop_last)
    share = size // world_size if drop_last else -(-size // world_size)
    assert [len(part) for part in parts] == [share] * world_size
    (whole,) = epoch_of(1, weights, draws=draws)
    mixed = [sample for step in zip(*parts, strict=True) for sample in step]
    assert mixed == list(np.resize(whole, share * world_size))


def test_without_anything_known_each_sample_comes_once() -> None:
    first, second = epoch_of(2)
    assert set(first + second) == set(range(N))
    sampler = sampler_of()
    ids = torch.tensor(list(sampler))
    assert sampler.weights_of(ids).tolist() == [1.0] * N


def test_epochs_differ_and_come_again() -> None:
    sampler = sampler_of(LOSSES)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1]
    sampler.set_epoch(1)
    assert [list(sampler), list(sampler)] == epochs[1:]


def test_draws_follow_the_weights_that_hold() -> None:
    weights = np.zeros(N)
    weights[[4, 9]] = 1, 3
    sampler = sampler_of(torch.tensor(weights), draws=4000, uniform_part=0)
    assert np.bincount(list(sampler), minlength=N)[[4, 9]] == pytest.approx([1000, 3000], abs=150)
    sampler.set_weights(weights[::-1].copy())
    drawn = np.bincount(list(sampler), minlength=N)[::-1]
    assert drawn[[4, 9]] == pytest.approx([1000, 3000], abs=150)
    sampler.update([3], torch.tensor([12.0], dtype=torch.bfloat16))
    assert np.bincount(list(sampler), minlength=N)[3] == pytest.approx(3000, abs=150)
    with pytest.raises(ConfigError, match="uniform_part=0 leaves"):
        sampler.weights_of([3])


def test_a_function_of_the_scores() -> None:
    asked = []

    def weights(scores: Scores) -> Any:
        asked.append(scores.seen.sum())
        return np.where(np.arange(N) == 7, 1.0, 0.0)

    sampler = sampler_of(weights, uniform_part=0)
    assert list(sampler) == [7] * N
    sampler.update([1, 2], [5.0, 6.0])
    assert list(sampler) == [7] * N
    assert asked == [0, 2]


def test_scores_of_another_run() -> None:
    scores = Scores(N)
    scores.update([7], [1.0], 0)
    scores.update(np.setdiff1d(np.arange(N), [7]), np.zeros(N - 1), 0)
    assert list(sampler_of(scores, uniform_part=0)) == [7] * N


# --- real ranks ---


def train(rank: int, num_workers: int) -> dict[str, Any]:
    """Three epochs; ranks see different samples and so learn different losses."""
    dataset = TensorDataset(torch.arange(N))
    sampler = DistributedImportanceSampler(dataset, seed=5)
    loader = DataLoader(
        WithIds(dataset),
        7,
        sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen = []
        for ids, (numbers,) in loader:
            assert torch.equal(ids, numbers)
            assert sampler.weights_of(ids).shape == ids.shape
            sampler.update(ids, torch.tensor(LOSSES)[ids])
            seen += ids.tolist()
        epochs.append(seen)
    iter_after = list(sampler)  # brings the ranks together
    return {"epochs": epochs, "values": sampler.scores.values.copy(), "next": iter_after}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_real_ranks_make_identical_plans(num_workers: int, tmp_path: Path) -> None:
    ranks = run_ranks(3, tmp_path, train, num_workers)
    assert {len(epoch) for rank in ranks for epoch in rank["epochs"]} == {21}
    first = [i for rank in ranks for i in rank["epochs"][0]]
    assert set(first) == set(range(N)), "the first epoch visits all"
    for rank in ranks:
        np.testing.assert_allclose(rank["values"], LOSSES)
    # One that was told everything draws the same epoch.
    alone = sampler_of(LOSSES, seed=5)
    alone.set_epoch(1)
    mixed = [i for step in zip(*(rank["epochs"][1] for rank in ranks), strict=True) for i in step]
    assert mixed[:N] == list(alone)


def with_other_weights(rank: int) -> str:
    sampler = sampler_of(LOSSES + rank)
    with pytest.raises(ConfigError, match="the ranks made different plans of epoch 0") as caught:
        list(sampler)
    return str(caught.value)


def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, with_other_weights)
    assert first == second


def test_ranks_that_cannot_talk_may_not_learn() -> None:
    sampler = sampler_of(LOSSES, num_replicas=2, rank=1)
    assert len(list(sampler)) == 31
    sampler.update([0], [1.0])
    with pytest.raises(ConfigError, match="init_process_group"):
        list(sampler)


# --- resume ---


def saved(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1), (1, 4)])
def test_the_rest_of_an_epoch_whatever_the_ranks(before: int, after: int) -> None:
    (expected,) = epoch_of(1, LOSSES, epoch=2)
    (later,) = epoch_of(1, LOSSES, epoch=3)
    found, states = [], []
    for rank in range(before):
        sampler = sampler_of(LOSSES, num_replicas=before, rank=rank)
        sampler.set_epoch(2)
        loader = DataLoader(range(N), 4, sampler=sampler, num_workers=0)
        batches = iter(loader)
        found.append([i for _ in range(3) for i in next(batches).tolist()])
        with pytest.raises(ConfigError, match="consumed="):
            sampler.state_dict()
        states.append(saved(sampler.state_dict(consumed=12)))
    done = [i for step in zip(*found, strict=True) for i in step]
    rest, whole = [], []
    for rank in range(after):
        sampler = sampler_of(LOSSES, num_replicas=after, rank=rank)
        sampler.load_state_dict(states[rank % before])
        assert saved(sampler.state_dict())["consumed"] == 12 * before
        sampler.set_epoch(2)
        length = len(sampler)
        rest.append(list(sampler))
        assert len(rest[-1]) == length
        whole.append(list(sampler))
    going_on = [i for step in zip(*rest, strict=True) for i in step]
    assert done + going_on[: N - len(done)] == expected
    assert [i for step in zip(*whole, strict=True) for i in step][:N] == later


def learn(sampler: DistributedImportanceSampler, steps: int | None) -> list[list[int]]:
    """Go through the coming epoch, or the beginning of it, with batches of 5."""
    batches = []
    for ids in DataLoader(range(N), 5, sampler=sampler):
        sampler.update(ids, LOSSES[ids] * (1 + sampler.scores.seen[ids]))
        batches.append(ids.tolist())
        if len(batches) == steps:
            break
    return batches


@pytest.mark.parametrize("steps", [1, 6, 13])
def test_resumes_exactly_where_updates_had_got_to(steps: int) -> None:
    whole, cut = sampler_of(), sampler_of()
    learn(whole, None)
    learn(cut, None)
    expected = [learn(whole, None), learn(whole, None)]
    begun = learn(cut, steps)
    fresh = sampler_of()
    fresh.load_state_dict(saved(cut.state_dict()))
    if steps < 13:
        begun += learn(fresh, None)
    assert [begun, learn(fresh, None)] == expected
    np.testing.assert_array_equal(fresh.scores.values, whole.scores.values)
    np.testing.assert_array_equal(fresh.scores.seen, whole.scores.seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1}, "seed=0 and this sampler has 1"),
        ({"draws": 10}, f"draws={N}"),
        ({"uniform_part": 0.1}, "uniform_part"),
    ],
)
def test_states_of_others_are_refused(arguments: Any, message: str) -> None:
    state = sampler_of(LOSSES).state_dict()
    with pytest.raises(StateMismatch, match=message):
        sampler_of(LOSSES, **arguments).load_state_dict(state)
    with pytest.raises(StateMismatch, match="version 7"):
        sampler_of(LOSSES).load_state_dict({**state, "version": 7})
    with pytest.raises(StateMismatch, match="damaged"):
        sampler_of(LOSSES).load_state_dict({**state, "agreed": {"values": torch.zeros(3)}})


def test_a_function_that_changed_is_noticed() -> None:
    def rising(scores: Scores) -> Any:
        return np.arange(N) + 1.0

    sampler = sampler_of(rising)
    next(iter(sampler))
    state = sampler.state_dict(consumed=1)
    with pytest.raises(StateMismatch, match="the function given as weights"):
        sampler_of(lambda scores: N - np.arange(N)).load_state_dict(state)


# --- refusals ---


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], f"2 weights for {N} samples"),
        (np.full(N, -1.0), "weight -1.0 of sample 0"),
        (np.full(N, np.nan), "weight nan of sample 0"),
        (np.ones((N, 2)), "shape"),
        (Scores(3), "3 weights"),
    ],
)
def test_weights_that_cannot_be_drawn_by(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler_of(weights)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="num_samples=0"):
        DistributedImportanceSampler([])
    with pytest.raises(ConfigError, match="draws=None of 61"):
        sampler_of(replacement=False)
    with pytest.raises(ConfigError, match="both or neither"):
        sampler_of(rank=1)
    with pytest.raises(ConfigError, match="epoch=-1"):
        sampler_of().set_epoch(-1)
    sampler = sampler_of(LOSSES, draws=5, replacement=False)
    with pytest.raises(ConfigError, match="no epoch yet"):
        sampler.weights_of([1])
    absent = np.setdiff1d(np.arange(N), list(sampler))
    with pytest.raises(ConfigError, match=f"sample {absent[0]} is not visited in epoch 0"):
        sampler.weights_of(absent)
    with pytest.raises(ConfigError, match="out of range"):
        sampler.update([N], [1.0])
    with pytest.raises(ConfigError, match="losses for"):
        sampler.update([1, 2], [1.0])
    with pytest.raises(ConfigError, match="consumed=9"):
        sampler.state_dict(consumed=9)


def test_a_loss_that_is_not_finite_leaves_the_weight() -> None:
    sampler = sampler_of(LOSSES)
    with pytest.warns(RuntimeWarning, match="a loss of sample 3 is not finite"):
        sampler.update([2, 3], [1.5, float("nan")])
    sampler.update([4], [float("inf")])  # told once
    assert sampler.scores.values[[2, 3, 4]].tolist() == [1.5, LOSSES[3], LOSSES[4]]


class Batched(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [("batched", index) for index in indices]


def test_ids_travel_with_samples() -> None:
    assert WithIds([10, 20])[1] == (1, 20) and len(WithIds([10, 20])) == 2
    assert WithIds([10, 20]).__getitems__([1, 0]) == [(1, 20), (0, 10)]
    assert WithIds(Batched(torch.zeros(3))).__getitems__([2]) == [(2, ("batched", 2))]
