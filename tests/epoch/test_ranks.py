"""Scores of all ranks made one table; the ranks live in one process here."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.epoch.ranks import Alone, exchange
from stoker.errors import ConfigError
from stoker.pytorch.ranks import joined
from stoker.scores import Scores

N = 12


class Threads:
    """A job whose ranks are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.table: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)

    def run(self, task: Any) -> None:
        members = [threading.Thread(target=task, args=(Rank(self, r),)) for r in range(len(self))]
        for member in members:
            member.start()
        for member in members:
            member.join()

    def __len__(self) -> int:
        return self.world_size


class Rank:
    def __init__(self, job: Threads, rank: int) -> None:
        self.job, self.rank, self.world_size = job, rank, len(job)

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        self.job.table[self.rank] = rows
        self.job.barrier.wait()
        every = list(self.job.table)
        self.job.barrier.wait()
        return every


def meet(tables: list[Scores], agreed: list[Scores]) -> None:
    Threads(len(tables)).run(lambda rank: exchange(tables[rank.rank], agreed[rank.rank], rank))


observations = st.lists(st.tuples(st.integers(0, N - 1), st.integers(-3, 3)), max_size=8)


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.lists(observations, min_size=3, max_size=3), min_size=1, max_size=3))
def test_all_ranks_hold_what_one_that_saw_everything_would(rounds: Any) -> None:
    tables = [Scores(N) for _ in range(3)]
    agreed = [scores.snapshot() for scores in tables]
    expected = Scores(N)
    step = 0
    for observed in rounds:
        # One that sees all: step by step, the ranks in order.
        longest = max(map(len, observed))
        for place in range(longest):
            for rank in range(3):
                if place < len(observed[rank]):
                    sample, value = observed[rank][place]
                    tables[rank].update([sample], [value], step + place)
                    expected.update([sample], [value], step + place)
        step += longest

        meet(tables, agreed)
        agreed = [scores.snapshot() for scores in tables]
        for scores in tables:
            for name in ("values", "last", "seen"):
                np.testing.assert_array_equal(getattr(scores, name), getattr(expected, name), name)


def test_the_rest_of_the_scores_is_left_alone() -> None:
    tables = [Scores(N), Scores(N)]
    agreed = [scores.snapshot() for scores in tables]
    for scores in tables:
        scores.record_epoch(0, accuracy=0.5, loss=1.5)
        scores.set_volatile([3])
        scores.ready = False
    meet(tables, agreed)
    for scores in tables:
        assert scores.accuracies.tolist() == [0.5] and scores.losses.tolist() == [1.5]
        assert np.flatnonzero(scores.volatile).tolist() == [3]
        assert not scores.ready


def test_alone_there_is_nothing_to_do() -> None:
    scores = Scores(N)
    scores.update([1], [2.0], 0)
    exchange(scores, Scores(N), Alone())
    assert scores.seen.sum() == 1


def test_ranks_that_cannot_talk_are_refused() -> None:
    assert joined(0, 1).gather(np.arange(3))[0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="init_process_group"):
        joined(1, 2)
