"""examples/ray_train.py trains, and goes on at the exact sample when a worker dies, or the run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.images import NUM_IMAGES, write_images

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "ray_train.py"
PATIENCE = 240.0

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='ray is not installed: pip install "ray[train]"'
)


@pytest.mark.exact("Ray Train", "with a stand-in of one worker: resumes with the missing samples")
def test_one_worker_goes_on_at_the_exact_sample_after_a_failure(tmp_path: Path) -> None:
    """Without Ray: what stands in for it runs one worker, which fails within the first epoch."""
    images, storage = write_images(tmp_path / "train"), tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(images), str(storage), "1", "2"],
        env=environment(tmp_path)
        | {"PYTHONPATH": str(HERE / "one_worker"), "SEEN": str(tmp_path / "seen")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "'epoch': 2}" in done.stdout
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    first, *lost = [note for note in seen if note["attempt"] == 0]
    again = [note for note in seen if note["attempt"] == 1]
    assert lost, "it failed before anything was lost"
    # The checkpoint is that of the first step: the rest of the epoch follows, and another one.
    numbers = [number for note in (first, *again) for number in note["numbers"]]
    assert sorted(numbers[:NUM_IMAGES]) == sorted(numbers[NUM_IMAGES:]) == list(range(NUM_IMAGES))
    assert again[0]["numbers"] == lost[0]["numbers"]
    assert again[0]["weights"] == lost[0]["weights"]
    begun, *_, ended = [torch.load(path)["epoch"] for path in sorted(storage.glob("*/state.pt"))]
    assert (begun, ended) == (0, 2)


def environment(place: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(place),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "STOKER_RUNTIME_DIR": str(place / "run"),
    }


Attempt = dict[int, list[list[int]]]
"""The epoch -> what all workers of an attempt were given in it, by steps."""


def attempt_in(place: Path, number: int, workers: int) -> Attempt:
    found: Attempt = {}
    files = sorted(place.glob(f"{number}-*.jsonl"))
    assert len(files) == workers
    for line in [line for file in files for line in file.read_text().splitlines()]:
        world_size, epoch, step, numbers = json.loads(line)
        assert world_size == workers
        steps = found.setdefault(epoch, [])
        steps += [[] for _ in range(step + 1 - len(steps))]
        steps[step] += numbers
    return found


@pytest.mark.exact("Ray Train", "with Ray: resumes with the missing samples after a worker died")
@pytest.mark.exact("Ray Train", "also with one worker after two, with more loader processes")
@pytest.mark.timeout(600)  # Ray starts many processes
@needs_ray
def test_what_was_missing_comes_once_after_a_worker_died_and_with_fewer(tmp_path: Path) -> None:
    write_images(tmp_path / "train")
    job = subprocess.run(
        [sys.executable, str(HERE / "ray_job.py")],
        env=environment(tmp_path)
        | {
            "PLACE": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(map(str, (EXAMPLE.parent, HERE.parent))),
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        },
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert job.returncode == 0, job.stdout
    assert json.loads((tmp_path / "metrics").read_text())["epoch"] == 2
    first, second, third = (attempt_in(tmp_path, *each) for each in ((0, 2), (1, 2), (2, 1)))
    # Each attempt has the last checkpoint before it: that of the first step of its first epoch.
    assert [list(attempt) for attempt in (first, second, third)] == [[0], [0, 1], [1]]
    assert len(first[0]) > 1 and len(second[1]) > 1, "nothing was lost"
    for begun, resumed in ((first[0], second[0]), (second[1], third[1])):
        numbers = [*begun[0], *itertools.chain(*resumed)]
        assert sorted(numbers) == list(range(NUM_IMAGES))
    assert sorted(first[0][1]) == sorted(second[0][0]), "what was lost comes first"
