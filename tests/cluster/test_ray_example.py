"""examples/ray_train.py trains, and goes on where it was when a worker dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.images import NUM_IMAGES, write_images
from support.waiting import await_true

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "ray_train.py"
EPOCHS = 4
PATIENCE = 240.0

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='ray is not installed: pip install "ray[train]"'
)


@pytest.mark.exact("Ray Train", "with a stand-in of one worker: resumes with the missing samples")
def test_one_worker_goes_on_at_the_exact_sample_after_a_failure(tmp_path: Path) -> None:
    """Without Ray: what stands in for it runs one worker, which fails within the first epoch."""
    images, storage = write_images(tmp_path / "train"), tmp_path / "runs"
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLE), str(images), "--storage", str(storage)),
            *("--epochs", "2", "--batch", "8"),
        ],
        env=environment(tmp_path)
        | {"PYTHONPATH": str(HERE / "one_worker"), "SEEN": str(tmp_path / "seen")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "'epoch': 2," in done.stdout
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


def worker_in(output: str) -> int:
    """The process of one of the workers, by what Ray prints before their lines."""
    return int(re.findall(r"RayTrainWorker pid=(\d+)", output)[0])


def reported(storage: Path) -> list[Path]:
    """The folders of the checkpoints that Ray restores, oldest first.

    Not all that are there: a worker that is killed while it writes one leaves a part of it.
    """
    found: list[Path] = []
    for snapshot in storage.glob("*/checkpoint_manager_snapshot.json"):
        with contextlib.suppress(json.JSONDecodeError):  # it is being written
            results = json.loads(snapshot.read_text())["checkpoint_results"]
            found += [snapshot.parent / result["checkpoint_dir_name"] for result in results]
    return sorted(found)


@pytest.mark.exact("Ray Train", "with Ray: a worker that is killed resumes from its checkpoint")
@pytest.mark.timeout(600)  # Ray starts many processes
@needs_ray
def test_a_worker_that_dies_is_started_again_where_it_was(tmp_path: Path) -> None:
    images, storage = write_images(tmp_path / "train"), tmp_path / "runs"
    command = [sys.executable, str(EXAMPLE), str(images), "--storage", str(storage)]

    def checkpoints() -> list[Path]:
        return [folder / "state.pt" for folder in reported(storage)]

    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            [*command, "--epochs", str(EPOCHS), "--batch", "8"],
            env=environment(tmp_path),
            cwd=tmp_path,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            begun = await_true(lambda: checkpoints() or process.poll() is not None, PATIENCE)
            assert begun and process.poll() is None, (tmp_path / "said").read_text()
            os.kill(worker_in((tmp_path / "said").read_text()), signal.SIGKILL)
            assert process.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
        finally:
            process.terminate()
            process.wait(60)
    output = (tmp_path / "said").read_text()
    assert output.count("Setting up process group") == 2, output
    (result,) = [line for line in output.splitlines() if line.startswith("{'loss'")]
    assert f"'epoch': {EPOCHS}," in result
    epochs = [torch.load(path)["epoch"] for path in checkpoints()]
    assert epochs == sorted(epochs), "it began anew"
    assert epochs[-1] == EPOCHS
