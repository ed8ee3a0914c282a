"""Batches that are held back, so that the loop waits for none for a while."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import number_of, numbers

import stoker
from stoker.epoch.batch import BatchSpec
from stoker.feed import Batch
from stoker.jobs import Sharing, gain
from stoker.jobs.board import JOB
from stoker.jobs.gain import MOST_BATCHES, HeldBack, bytes_of
from stoker.pytorch import Loader, SampleDataset


class Clock:
    """A clock that a fake training moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def arriving(clock: Clock, batches: int, seconds: float) -> Iterator[int]:
    """Yield batches that take so many seconds to come."""
    for number in range(batches):
        clock.now += seconds
        yield number


def a_row() -> Any:
    return np.zeros(1, JOB)[0:1][0]


def train(held: HeldBack[int], clock: Clock, step: float) -> list[int]:
    """Return the batches that a loop with steps of so many seconds gets."""
    seen = []
    for batch in held:
        seen.append(batch)
        clock.now += step
    return seen


def test_it_measures_the_step_without_the_wait_and_keeps_order_and_number() -> None:
    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    seen = train(HeldBack(arriving(clock, 40, 0.3), row, clock), clock, 0.1)
    assert seen == list(range(40))
    assert row["probes_done"] == 1
    assert row["probe_batches"] == MOST_BATCHES
    assert row["probe_seconds"] == pytest.approx(0.1)
    assert clock.now == pytest.approx(100 + 40 * 0.4)


def test_an_accelerator_that_goes_on_while_python_asks_is_measured_by_its_own_pace() -> None:
    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    done: list[float] = []  # when the accelerator ends each step
    for _ in HeldBack(arriving(clock, 30, 0.3), row, clock):
        clock.now += 0.005  # to queue a step, of which three fit
        done.append(max(clock.now, done[-1] if done else 0.0) + 0.05)
        clock.now = max(clock.now, done[-4] if len(done) > 3 else 0.0)
    assert row["probe_seconds"] == pytest.approx(0.05)


def test_nothing_is_held_back_unless_somebody_asks() -> None:
    clock = Clock()
    held = HeldBack(arriving(clock, 3, 1.0), a_row(), clock)
    assert next(held) == 0
    assert clock.now == pytest.approx(101)


@pytest.mark.parametrize(
    ("name", "value", "expected"), [("MOST_SECONDS", 2.0, 7), ("MOST_BYTES", 5, 5)]
)
def test_time_and_bytes_are_bounded(
    name: str, value: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gain, name, value)
    monkeypatch.setattr(gain, "bytes_of", lambda batch: 1)
    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    assert train(HeldBack(arriving(clock, 30, 0.3), row, clock), clock, 0.1) == list(range(30))
    assert row["probe_batches"] == expected


def test_too_few_at_the_end_of_an_epoch_are_tried_again_in_the_next() -> None:
    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    assert train(HeldBack(arriving(clock, 2, 0.3), row, clock), clock, 0.1) == [0, 1]
    assert row["probes_done"] == 0
    train(HeldBack(arriving(clock, 9, 0.3), row, clock), clock, 0.1)
    assert (row["probes_done"], row["probe_batches"]) == (1, 9)


def test_batches_too_large_to_hold_are_an_answer_without_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gain, "MOST_BYTES", 1)
    monkeypatch.setattr(gain, "bytes_of", lambda batch: 1)
    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    assert train(HeldBack(arriving(clock, 4, 0.3), row, clock), clock, 0.1) == [0, 1, 2, 3]
    assert (row["probes_done"], row["probe_seconds"]) == (1, 0.0)


def test_an_error_comes_in_its_turn_and_iterating_goes_on() -> None:
    class Failing:
        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> Failing:
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number == 5:
                raise OSError("the fifth")
            return self.number

    clock, row = Clock(), a_row()
    row["probes_wanted"] = 1
    held = HeldBack(Failing(), row, clock)
    assert [next(held) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(OSError, match="the fifth"):
        next(held)
    assert next(held) == 6
    assert (row["probes_done"], row["probe_batches"]) == (1, 4)


def test_bytes_of_batches_of_many_types() -> None:
    assert bytes_of({"a": np.zeros(3), "b": [torch.zeros(2), "text"]}) == 24 + 8 + 4
    assert bytes_of(SimpleNamespace(x=np.zeros(2), own=(b"12", None))) == 18
    assert bytes_of(BatchSpec(np.zeros(2, np.uint32), np.zeros(2, np.int64))) == 24
    none = np.empty(0, np.uint32)
    batch = Batch(0, 0, none, none, none, None, np.zeros(4))  # type: ignore[arg-type]
    assert bytes_of(batch) == 32
    loop: list[Any] = [b"1"]
    loop.append(loop)
    assert bytes_of(loop) < 10  # it ends


@pytest.mark.parametrize("front_end", ["feed", "loader"])
def test_a_probed_epoch_has_each_sample_once(front_end: str) -> None:
    cache = stoker.Cache("50%", sharing=Sharing("probed"))
    if front_end == "feed":
        loader: Any = stoker.Feed(
            numbers(400), 8, decode=number_of, cache=cache, recipe="minio", decode_threads=2
        )
    else:
        data = SampleDataset(numbers(400), number_of)
        loader = Loader(data, 8, cache=cache, recipe="minio", num_workers=2)
    with loader:
        for epoch in range(2):
            seen: list[int] = []
            for number, batch in enumerate(loader):
                member = loader._session.setup.member
                row = member._board.jobs[member._slot]
                if number == 3:
                    row["probes_wanted"] += 1
                seen += (batch.data if front_end == "feed" else batch).tolist()
            assert sorted(seen) == list(range(400))
            assert row["probes_done"] == epoch + 1
            assert row["probe_batches"] == MOST_BATCHES
            assert row["probe_seconds"] > 0
