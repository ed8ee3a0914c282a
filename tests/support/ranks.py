"""Runs a function in several processes that are the ranks of one torch.distributed job."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from support.processes import warm


def run_ranks(world_size: int, place: Path, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return ``task(rank, *arguments)`` of each rank; ``task`` is importable."""
    results: Any = warm.Queue()
    meeting = f"file://{place}/meeting"
    processes = [
        warm.Process(target=_rank, args=(rank, world_size, meeting, results, task, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    failed = [said for kind, said in found.values() if kind == "error"]
    assert not failed, failed[0]
    return [found[rank][1] for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    meeting: str,
    results: Any,
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # More workers than cores, and a machine with little memory, are no matter here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    try:
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=world_size)
        results.put((rank, ("result", task(rank, *arguments))))
        distributed.barrier()
        distributed.destroy_process_group()
    except BaseException:
        results.put((rank, ("error", traceback.format_exc())))
