"""The prefetch process for real: filling, dying, hanging, ending."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.prefetching import NUM, SAMPLES, Rank, order, processes, small_arena
from support.waiting import await_true

from stoker.source.base import BaseSource
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.testing.sources import SlowSource


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowSource:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    return SlowSource(MemorySource(SAMPLES), latency=0.001)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with small_arena() as arena:
        yield arena


def test_it_reads_each_sample_once_and_ahead(
    source: SlowSource, arena: Arena, tmp_path: Path
) -> None:
    rank = Rank(arena, source)
    try:
        rank.publish(order())
        assert rank.walk(order()) == 0
        assert source.reads.tolist() == [1] * NUM
        assert rank.fresh.array.all()  # every one was read for an access; nobody counted it here
        arena.verify()
        # Only what the policy kept is left: the window holds nothing that was used.
        assert await_true(lambda: arena.stats()["regions"]["window"]["entries"] == 0)
    finally:
        rank.prefetcher.close()
    assert await_true(lambda: not processes(tmp_path))


def test_two_ranks_share_one_process(source: SlowSource, arena: Arena, tmp_path: Path) -> None:
    ranks = [Rank(arena, source), Rank(arena, source)]
    try:
        for number, rank in enumerate(ranks):
            rank.publish(order()[number::2])
        for number, rank in enumerate(ranks):
            assert rank.walk(order()[number::2]) == 0
        assert len(processes(tmp_path)) == 1
        assert source.reads.tolist() == [1] * NUM
    finally:
        for rank in ranks:
            rank.prefetcher.close()


def test_killed_it_is_started_again_with_one_warning(
    source: SlowSource, arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(arena, source)
    try:
        rank.publish(order())
        with caplog.at_level(logging.WARNING, "stoker"):
            missing = 0
            for at, sample in enumerate(order().tolist()):
                # What the dead process was reading is the worker's to read; the rest comes.
                missing += not await_true(lambda: arena.contains([sample])[0], 3.0)  # noqa: B023
                rank.serve(at)
                if at in (100, 200):
                    for pid in processes(tmp_path):
                        os.kill(pid, signal.SIGKILL)
        assert missing <= 2
        assert len([r for r in caplog.records if "died or hung" in r.message]) == 1
        arena.verify()
    finally:
        rank.prefetcher.close()


def test_hung_it_is_replaced(
    source: SlowSource, arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(arena, source)
    try:
        rank.publish(order())
        assert await_true(lambda: arena.contains(order()[:1])[0])
        assert await_true(lambda: len(processes(tmp_path)) == 1)
        time.sleep(1.2)  # it has said that it is alive
        (hung,) = processes(tmp_path)
        os.kill(hung, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "stoker"):
            assert rank.walk(order(), patience=15.0) == 0
        assert hung not in processes(tmp_path)
    finally:
        rank.prefetcher.close()


def test_another_epoch_instead(source: SlowSource, arena: Arena) -> None:
    rank = Rank(arena, source)
    try:
        rank.publish(order())
        assert await_true(lambda: arena.contains(order()[:1])[0])
        rank.prefetcher.reset()
        rank.publish(order(5), epoch=5)
        # What was under way for the old plan may be left to the workers.
        assert rank.walk(order(5), patience=3.0) <= 4
    finally:
        rank.prefetcher.close()


def test_reading_ahead_follows_the_memory_that_a_cache_has(
    source: SlowSource, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that began with no memory was never read ahead for, however much it got later."""
    arena.limit(0)
    rank, is_alive = Rank(arena, source), threading.Event()
    try:
        monkeypatch.setattr(rank.prefetcher._supervisor, "_heard", lambda _: is_alive.set())
        rank.publish(order())
        assert is_alive.wait(30)
        arena.limit(arena.capacity_bytes)
        assert rank.walk(order()) == 0
        assert source.reads.tolist() == [1] * NUM
    finally:
        rank.prefetcher.close()


class Closure(BaseSource):
    """A source that cannot be passed on."""

    fingerprint = "closure"
    sizes = np.full(NUM, 10)

    def __init__(self) -> None:
        self.read = lambda ids: [b"x" * 10 for _ in ids]

    def __len__(self) -> int:
        return NUM


def test_a_source_that_cannot_be_passed_on_is_left_to_the_workers(
    source: SlowSource, arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stoker"):
        rank = Rank(arena, Closure())
        rank.publish(order())
        assert await_true(lambda: "workers read them" in caplog.text)
        rank.prefetcher.close()
    assert not processes(tmp_path)


def test_its_claims_end_with_it(arena: Arena, source: SlowSource) -> None:
    rank = Rank(arena, source)
    try:
        rank.publish(order())
        assert rank.walk(order()[:50]) == 0
    finally:
        rank.prefetcher.close()
    everything = np.arange(NUM, dtype=np.uint32)
    absent = everything[~arena.contains(everything)]
    assert await_true(lambda: arena.claim(absent[:1])[0])
    arena.abandon(absent[:1])
