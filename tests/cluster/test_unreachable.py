"""Ranks that are gone or stopped: an error that says so, within the time-out, and no hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import warm
from support.waiting import until
from torch import distributed

from stoker.epoch.ranks import Ranks
from stoker.errors import RanksUnavailable
from stoker.pytorch.ranks import Group, from_rank_zero

TIMEOUT = 3.0


def length_of_all(rank: int) -> int:
    return sum(len(part) for part in Group().gather(np.arange(5 + rank)))


def length_of_text(rank: int) -> int:
    return len(from_rank_zero("key" * (rank + 1), Ranks(rank, 2)) or "")


def meet(
    rank: int, ask: Callable[[int], int], meeting: str, ready: Any, go: Path, results: Any
) -> None:
    distributed.init_process_group(
        "gloo", meeting, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
    )
    ready.put((length_of_all(rank), length_of_text(rank)))
    if rank:
        signal.pause()
    until(go.exists)  # an Event would wait for the rank that is gone
    try:
        results.put(("answered", ask(rank)))
    except Exception as error:
        results.put((type(error).__name__, str(error)))
    os._exit(0)  # the group cannot be taken down in order


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
@pytest.mark.parametrize("ask", [length_of_all, length_of_text])
def test_a_rank_that_does_not_answer(
    ask: Callable[[int], int], fate: signal.Signals, tmp_path: Path
) -> None:
    ready, results, go = warm.Queue(), warm.SimpleQueue(), tmp_path / "go"
    meeting = f"file://{tmp_path}/meeting"
    ranks = [
        warm.Process(target=meet, args=(rank, ask, meeting, ready, go, results))
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        assert [ready.get(timeout=60) for _ in ranks] == [(11, 3), (11, 3)]
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, fate)
        go.touch()
        ranks[0].join(60)
        assert not results.empty(), "a rank hangs"
        kind, message = results.get()
        assert kind == RanksUnavailable.__name__, message
        assert message.startswith("rank 0 of 2 cannot exchange with the others: ")
        assert "Start all ranks again" in message
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
