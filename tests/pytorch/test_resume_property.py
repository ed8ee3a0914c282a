"""Interrupted anywhere, any number of times, by any set-up: the run is the same."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.parts import number_of, numbers

import stoker
from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.testing.sources import SlowSource

EPOCHS = 2
MIXTURE = "a mixture"


class Job(NamedTuple):
    """How the job is run until its next interruption."""

    steps: int
    world_size: int
    num_workers: int
    prefetch: bool
    batch_size: int


jobs = st.builds(
    Job,
    steps=st.integers(0, 9),
    world_size=st.sampled_from([1, 1, 2, 3]),
    num_workers=st.sampled_from([0, 0, 0, 2]),
    prefetch=st.sampled_from([False, False, True]),
    batch_size=st.sampled_from([1, 4, 5]),
)


def noisy(number: int) -> tuple[int, float]:
    """The sample, and an augmentation that draws from two generators."""
    return number, torch.rand(()).item() + np.random.rand()  # noqa: NPY002


def dataset_of(count: int) -> SampleDataset:
    return SampleDataset(SlowSource(numbers(count), latency=0.0), number_of, noisy)


def loader_of(count: int, job: Job, rank: int, recipe: str) -> Loader:
    dataset: Any = dataset_of(count)
    if recipe == MIXTURE:
        parts = {"many": dataset, "few": dataset_of(3)}
        dataset = stoker.mix(parts, {"many": 0.7, "few": 0.3}, epoch_samples=count)
    return Loader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        recipe="foresight" if recipe == MIXTURE else recipe,
        cache=Cache("50%", prefetch="1MiB" if job.prefetch else 0),
        rank=rank,
        world_size=job.world_size,
        multiprocessing_context="fork" if job.num_workers else None,
        return_meta=True,
    )


Access = tuple[int, int, float]
"""(epoch, sample, augmentation) of a place in the plan."""


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def run_rank(
    count: int, job: Job, rank: int, recipe: str, state: Any, steps: int | None
) -> tuple[dict[tuple[int, int], Access], Any, int]:
    """Return what each place (epoch, position) gave, the state afterwards, and the steps done."""
    found: dict[tuple[int, int], Access] = {}
    done = 0
    with loader_of(count, job, rank, recipe) as loader:
        if state is not None:
            loader.load_state_dict(state)
        first = 0 if state is None else state["epoch"]
        for epoch in range(first, EPOCHS):
            loader.set_epoch(epoch)
            expected = len(loader)
            given_out = 0
            for batch, noise, meta in loader:
                places = meta.positions.tolist()
                values = zip(places, batch.tolist(), noise.tolist(), strict=True)
                for place, sample, augmentation in values:
                    assert (epoch, place) not in found
                    found[epoch, place] = (epoch, sample, augmentation)
                given_out += 1
                done += 1
                if done == steps:
                    return found, through_a_file(loader.state_dict()), done
            assert given_out == expected
        return found, None, done


def run(count: int, script: list[Job], recipe: str) -> dict[tuple[int, int], Access]:
    """Run the jobs in turn, each from the state of the one before; the last to the end."""
    found: dict[tuple[int, int], Access] = {}
    state = None
    for number, job in enumerate(script):
        steps = job.steps if number + 1 < len(script) else None
        if steps == 0:
            continue
        ranks = [run_rank(count, job, rank, recipe, state, steps) for rank in range(job.world_size)]
        states = [after for _, after, _ in ranks]
        assert len({done for _, _, done in ranks}) == 1
        assert len({str((s["epoch"], s["consumed"], s["steps"])) for s in states if s}) <= 1
        for part, _, _ in ranks:
            assert not part.keys() & found.keys()
            found |= part
        state = states[0]
        if state is None:
            break
    return found


@pytest.mark.filterwarnings("ignore:a running job's cache")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("recipe", ["minio", "belady", MIXTURE])
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(count=st.integers(5, 40), script=st.lists(jobs, min_size=2, max_size=5))
def test_interruptions_change_nothing(
    recipe: str, count: int, script: list[Job], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path))
    alone = Job(0, 1, 0, False, 4)
    expected = run(count, [alone], recipe)
    found = run(count, script, recipe)
    for (epoch, place), access in found.items():
        if place < count:
            assert access == expected[epoch, place]
        else:  # padding repeats the start of the epoch, augmented anew
            assert access[1] == expected[epoch, place % count][1]
    for epoch in range(EPOCHS):
        assert {(epoch, place) for place in range(count)} <= found.keys()
