"""torchrun for real: ranks on several nodes that die, and go on as others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("elastic_job.py")
COUNT, BATCH, EPOCHS = 96, 4, 2

Seen = dict[tuple[int, int], tuple[int, float]]
"""(epoch, place in the plan) -> the sample and its augmentation."""


def torchrun(
    folder: Path, processes: int, *, die_at: int = 0, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command += [str(JOB), str(folder), str(COUNT), str(BATCH), str(EPOCHS), str(die_at)]
    environment = {
        **os.environ,
        "STOKER_RUNTIME_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
        # Else gloo finds the addresses of the attempt before in the agent's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


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
    run = torchrun(folder, 1)
    assert run.returncode == 0, run.stderr
    return seen_in(folder)


@pytest.mark.parametrize("after", [1, 3])
def test_ranks_that_die_go_on_as_another_number(
    after: int, uninterrupted: Seen, tmp_path: Path
) -> None:
    run = torchrun(tmp_path, 2, die_at=5)
    assert run.returncode != 0 and (tmp_path / "died").exists()
    run = torchrun(tmp_path, after)
    assert run.returncode == 0, run.stderr
    assert_the_same(tmp_path, uninterrupted)


def test_torchrun_starts_a_dead_rank_again(uninterrupted: Seen, tmp_path: Path) -> None:
    run = torchrun(tmp_path, 2, die_at=5, restarts=1)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "died").exists()
    assert_the_same(tmp_path, uninterrupted)


def assert_the_same(folder: Path, uninterrupted: Seen) -> None:
    found = seen_in(folder)
    within: dict[Any, Any] = {key: what for key, what in found.items() if key[1] < COUNT}
    assert within == uninterrupted
    assert all(len(set(lengths)) == 1 for lengths in lengths_in(folder).values())
