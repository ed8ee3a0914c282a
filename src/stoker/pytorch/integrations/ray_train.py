"""Ray Train: the Loader's state in Ray's checkpoints, and resuming from them.

::

    def train(config):  # what TorchTrainer runs on each worker
        with stoker.Loader(dataset, 64, cache="20%") as loader:
            checkpoints = Checkpoints(loader, model=model, optimiser=optimiser)
            for epoch in range(checkpoints.restore(), epochs):
                for step, (x, y) in enumerate(loader):
                    ...
                    if step % 100 == 0:
                        checkpoints.report(epoch, loss=loss.item())
                checkpoints.report(epoch + 1)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import StateMismatch
from stoker.pytorch.loader import Loader

_FILE = "state.pt"


class Checkpoints:
    """Saves and loads the state of a Loader, and of ``parts`` by their names, through Ray Train.

    Parts are a model, an optimiser, a schedule: what has ``state_dict`` and ``load_state_dict``.

    Of a model that ``ray.train.torch.prepare_model`` made parallel the state is that of the model
    inside, so that a run resumes with any number of workers. Made and used by one thread of each
    worker, after Ray has started it.
    """

    def __init__(self, loader: Loader, **parts: Stateful) -> None:
        self._loader = loader
        self._parts = {
            name: part.module if isinstance(part, DistributedDataParallel) else part
            for name, part in parts.items()
        }

    def restore(self) -> int:
        """Load what Ray's latest checkpoint holds; return the epoch to resume with.

        The first iteration of the Loader is then the rest of that epoch. Without a checkpoint, as
        in a new run, nothing is loaded and the epoch is 0. Raises
        :class:`~stoker.errors.StateMismatch` for a checkpoint that lacks a part, before any is
        loaded, and for what :meth:`Loader.load_state_dict` refuses; what reading it raises.
        """
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return 0
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / _FILE, map_location="cpu", weights_only=True)
        if lacking := sorted(self._parts.keys() - state["parts"].keys()):
            raise StateMismatch(
                f"the checkpoint has no state of {', '.join(lacking)}: it has "
                f"{', '.join(sorted(state['parts'])) or 'none'}; name the parts as before"
            )
        self._loader.load_state_dict(state["loader"])
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        return int(state["epoch"])

    def report(self, epoch: int, **metrics: Any) -> None:
        """Tell Ray ``metrics`` and ``epoch``, with a checkpoint of rank 0 to resume with.

        All workers call it at the same step. It returns once Ray has the checkpoint. Raises what
        saving, :meth:`Loader.state_dict` and ``ray.train.report`` raise.
        """
        state = self._loader.state_dict()  # on each rank: some recipes gather what was served
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"epoch": epoch, "loader": state, "parts": parts}, Path(folder) / _FILE)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({**metrics, "epoch": epoch}, checkpoint=checkpoint)
