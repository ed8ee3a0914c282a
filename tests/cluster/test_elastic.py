"""torchrun's agent for real: ranks on several nodes that die, and go on as others."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.processes import warm
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cluster import elastic_job

COUNT, BATCH, EPOCHS = 96, 4, 2

Seen = dict[tuple[int, int], tuple[int, float]]
"""(epoch, place in the plan) -> the sample and its augmentation."""


def torchrun(folder: Path, processes: int, *, die_at: int = 0, restarts: int = 0) -> int:
    """What ``torchrun --standalone`` does; returns the exit status of its agent."""
    arguments = (folder, COUNT, BATCH, EPOCHS, die_at)
    agent = warm.Process(target=run_agent, args=(processes, restarts, arguments))
    agent.start()
    agent.join(150)
    assert agent.exitcode is not None, "it hangs"
    return agent.exitcode


def run_agent(processes: int, restarts: int, arguments: tuple[Any, ...]) -> None:
    os.environ["STOKER_RUNTIME_DIR"] = str(arguments[0] / "run")
    # Else gloo finds the addresses of the attempt before in the agent's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",  # of an agent that has imported what the ranks need
    )
    elastic_launch(config, elastic_job.main)(*arguments)


def seen_in(folder: Path) -> Seen:
    found: Seen = {}
    for file in folder.glob("seen-*.jsonl"):
        for line in file.read_text().splitlines():
            epoch, _, places, samples, noise = json.loads(line)
            for place, sample, augmentation in zip(places, samples, noise, strict=True):
                assert found.setdefault((epoch, place), (sample, augmentation)) == (
                    sample,
                    augmentation,
                )
    return found


def lengths_in(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(world size, step) -> the length of each rank's batch."""
    found: dict[tuple[int, int], list[int]] = {}
    for file in folder.glob("seen-*.jsonl"):
        for line in file.read_text().splitlines():
            _, step, places, *_ = json.loads(line)
            found.setdefault((int(file.name.split("-")[1]), step), []).append(len(places))
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("whole")
    assert torchrun(folder, 1) == 0
    return seen_in(folder)


@pytest.mark.parametrize("after", [1, 3])
def test_ranks_that_die_go_on_as_another_number(
    after: int, uninterrupted: Seen, tmp_path: Path
) -> None:
    assert torchrun(tmp_path, 2, die_at=5) != 0 and (tmp_path / "died").exists()
    assert torchrun(tmp_path, after) == 0
    assert_the_same(tmp_path, uninterrupted)


def test_torchrun_starts_a_dead_rank_again(uninterrupted: Seen, tmp_path: Path) -> None:
    assert torchrun(tmp_path, 2, die_at=5, restarts=1) == 0
    assert (tmp_path / "died").exists()
    assert_the_same(tmp_path, uninterrupted)


def assert_the_same(folder: Path, uninterrupted: Seen) -> None:
    found = seen_in(folder)
    within: dict[Any, Any] = {key: what for key, what in found.items() if key[1] < COUNT}
    assert within == uninterrupted
    assert all(len(set(lengths)) == 1 for lengths in lengths_in(folder).values())
