"""A training job for torchrun's agent that saves its state at each step, and may die."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from stoker import Cache
from stoker.pytorch import Loader, SampleDataset
from stoker.source import MemorySource


def number_of(raw: bytes) -> int:
    return int(raw)


def augmented(number: int) -> tuple[int, float]:
    return number, torch.rand(()).item()


def main(folder: Path, count: int, batch: int, epochs: int, die_at: int) -> None:
    """Train on ``count`` samples; each rank writes what it was given to ``folder``, a line a batch.

    Rank 1 kills itself after step ``die_at`` of the first attempt.
    """
    # Two processes of one agent are two nodes here, as are those of two agents.
    os.environ["STOKER_NODE"] = f"n{os.environ['RANK']}"
    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    dataset = SampleDataset(
        MemorySource([f"{i}".encode() for i in range(count)]), number_of, augmented
    )
    checkpoint = folder / "checkpoint.pt"
    with Loader(
        dataset, batch_size=batch, cache=Cache("20%", prefetch=0), return_meta=True
    ) as loader:
        first, done = 0, 0
        if checkpoint.exists():
            state = torch.load(checkpoint)
            first, done = state["epoch"], state["done"]
            loader.load_state_dict(state["loader"])
        for epoch in range(first, epochs):
            loader.set_epoch(epoch)
            for samples, noise, meta in loader:
                done += 1
                line = [epoch, done, meta.positions.tolist(), samples.tolist(), noise.tolist()]
                distributed.barrier()  # a step of all ranks, or none
                with (folder / f"seen-{world_size}-{rank}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                state = {"epoch": epoch, "done": done, "loader": loader.state_dict()}
                distributed.barrier()
                if rank == 0:
                    torch.save(state, folder / "next.pt")
                    (folder / "next.pt").rename(checkpoint)
                distributed.barrier()
                if done == die_at and rank == 1 and not (folder / "died").exists():
                    (folder / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    distributed.destroy_process_group()
