"""examples/ray_train.py trains, and goes on where it was when a worker dies."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from companions import await_true, processes_of
from pytorch.conftest import write_images

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
EPOCHS = 4
PATIENCE = 240.0

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='no Ray here: pip install "ray[train]"'
)


def test_the_example_is_python() -> None:
    compile(EXAMPLE.read_text(), str(EXAMPLE), "exec")


@needs_ray
def test_a_worker_that_dies_is_started_again_where_it_was(tmp_path: Path) -> None:
    images, storage = write_images(tmp_path / "train"), tmp_path / "runs"
    command = [sys.executable, str(EXAMPLE), str(images), "--storage", str(storage)]
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "STOKER_RUNTIME_DIR": str(tmp_path / "run"),
    }

    def checkpoints() -> list[Path]:
        return sorted(storage.glob("*/checkpoint_*/state.pt"))

    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            [*command, "--epochs", str(EPOCHS), "--batch", "8"],
            env=environment,
            cwd=tmp_path,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            begun = await_true(lambda: checkpoints() or process.poll() is not None, PATIENCE)
            assert begun and process.poll() is None, (tmp_path / "said").read_text()
            os.kill(min(processes_of("RayTrainWorker", tmp_path)), signal.SIGKILL)
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
