"""Runs examples/ray_train.py in Ray: with two workers, of which one dies twice, then with one.

All of it lies in the folder that ``PLACE`` names: images in ``train``, checkpoints in ``runs``.
Ray makes the first death good; the second ends the run. Each worker writes what its batches have to
``ATTEMPT-RANK.jsonl``, a line a batch: how many workers there are, the epoch, the step that this
attempt is at in it, and the numbers of the images, which are their pixels. The metrics that the
example prints go to ``metrics``, since Ray's processes write between the words of a terminal.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_train
from support.waiting import until

import stoker

DIES_BEFORE = 2
"""The step of the epoch that one of two workers does not live to take."""

place = Path(os.environ["PLACE"])


class NotingLoader(stoker.Loader):
    """Notes its batches before they are trained on."""

    def __iter__(self) -> Iterator[Any]:
        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
        attempt, epoch = deaths(), self.state_dict()["epoch"]
        with (place / f"{attempt}-{rank}.jsonl").open("a", buffering=1) as notes:
            for step, batch in enumerate(super().__iter__()):
                if (workers, rank, epoch, step) == (2, 1, attempt, DIES_BEFORE):
                    die(attempt)
                numbers = batch[0][:, 0, 0, 0].tolist()
                notes.write(json.dumps([workers, epoch, step, numbers]) + "\n")
                yield batch


def deaths() -> int:
    return len(list(place.glob("death-*")))


def die(number: int) -> None:
    """Once Ray has written down all checkpoints: rank 0 made its last before the last step."""
    until(lambda: reported() == {folder.name for folder in place.glob("runs/run/checkpoint_2*")})
    (place / f"death-{number}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def reported() -> set[str]:
    """Return the folders of the checkpoints that a run of this name restores the last of."""
    try:
        snapshot = json.loads((place / "runs/run/checkpoint_manager_snapshot.json").read_text())
    except (OSError, json.JSONDecodeError):  # it is being written
        return set()
    return {result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]}


def train(config: dict[str, Any], train: Any = ray_train.train) -> None:
    stoker.Loader = NotingLoader  # in the process of a worker
    train(config)


def run(workers: int, processes: int) -> dict[str, Any]:
    trainer = ray_train.main(str(place / "train"), str(place / "runs"), workers, processes)
    return trainer.fit().metrics


def main() -> None:
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    ray_train.train = train
    only = ray_train.FailureConfig(max_failures=1)
    ray_train.FailureConfig = lambda **_: only
    try:
        run(2, 1)
    except ray.train.TrainingFailedError:
        assert deaths() == 2
    (place / "metrics").write_text(json.dumps(run(1, 3)))


if __name__ == "__main__":
    main()
