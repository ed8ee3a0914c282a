"""Several processes that read: the same promises as with one, whichever of them dies."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.prefetching import NUM, SAMPLES, Rank, order, processes, small_arena
from support.processes import processes_of
from support.waiting import await_true, until

from stoker.errors import SampleCorrupt
from stoker.node.messages import Channel
from stoker.prefetch.crew import Crew, Headcount
from stoker.prefetch.walk import Group, Marks, Segment
from stoker.source.held import MemorySource
from stoker.store.arena import Arena
from stoker.store.flight import Meter
from stoker.testing.sources import SlowSource


class OneByOne(SlowSource):
    """Read by threads, sample by sample."""

    @property
    def lanes(self) -> int:
        return 4


@pytest.fixture(params=[SlowSource, OneByOne])
def source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SlowSource:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    made: SlowSource = request.param(MemorySource(SAMPLES), latency=0.002)
    return made


@pytest.fixture
def arena() -> Iterator[Arena]:
    with small_arena() as arena:
        yield arena


def mates(tmp: Path) -> list[int]:
    """The further processes that use this test's runtime directory."""
    return processes_of("stoker.prefetch.mate", tmp)


def has_come_up(mate: int) -> bool:
    """Whether a further process waits with the arena mapped."""
    stat = Path(f"/proc/{mate}/stat").read_text()
    is_waiting = stat.rpartition(")")[2].split()[0] == "S"
    return is_waiting and "/memfd:stoker " in Path(f"/proc/{mate}/maps").read_text()


@pytest.mark.parametrize("fetchers", [1, 2, 3])
def test_each_sample_is_read_once_and_ahead(
    source: SlowSource, arena: Arena, tmp_path: Path, fetchers: int
) -> None:
    rank = Rank(arena, source, fetchers=fetchers)
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == fetchers - 1)
        assert rank.walk(order()) == 0
        assert source.reads.tolist() == [1] * NUM
        assert rank.fresh.array.all()
        until(lambda: rank.read.array[0] == NUM)  # once the others have said what they read
        assert 0.0 < rank.read.array[1] < 60.0
        arena.verify()
        assert await_true(lambda: arena.stats()["regions"]["window"]["entries"] == 0)
    finally:
        rank.prefetcher.close()
    assert await_true(lambda: not processes(tmp_path))
    assert await_true(lambda: not mates(tmp_path))


def test_a_killed_one_holds_nobody_up(source: SlowSource, arena: Arena, tmp_path: Path) -> None:
    rank = Rank(arena, source, fetchers=3)
    killed: list[int] = []
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == 2)
        until(lambda: len(processes(tmp_path)) == 1)
        (planner,) = processes(tmp_path)
        for at, sample in enumerate(order().tolist()):
            assert await_true(lambda: arena.contains([sample])[0])  # noqa: B023
            assert arena.get(sample) == SAMPLES[sample]
            rank.serve(at)
            if at in (100, 200):
                killed += sorted(set(mates(tmp_path)) - set(killed))[:1]
                os.kill(killed[-1], signal.SIGKILL)
        # What the dead had read and not brought is read once more, and nothing else.
        assert source.reads.max() <= 2
        assert np.count_nonzero(source.reads == 2) <= 60
        assert planner in processes(tmp_path), "the one that plans stays"
        # One that it has just forked bears its name for a moment.
        until(lambda: processes(tmp_path) == [planner])
        arena.verify()
        until(lambda: len(set(mates(tmp_path)) - set(killed)) == 2)
    finally:
        rank.prefetcher.close()
    assert await_true(lambda: not mates(tmp_path))


def test_a_stopped_one_is_replaced_and_holds_nobody_up_for_long(
    source: SlowSource, arena: Arena, tmp_path: Path
) -> None:
    rank = Rank(arena, source, fetchers=2)
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == 1)
        assert rank.walk(order()[:50]) == 0
        (stopped,) = mates(tmp_path)
        # One that is still starting is given far more time.
        until(lambda: has_come_up(stopped))
        os.kill(stopped, signal.SIGSTOP)
        for at, sample in enumerate(order().tolist()):
            if at >= 50:
                assert await_true(lambda: arena.contains([sample])[0], 30.0)  # noqa: B023
                rank.serve(at)
        assert source.reads.min() == 1
        until(lambda: stopped not in mates(tmp_path))
    finally:
        rank.prefetcher.close()


def test_they_end_when_the_process_that_plans_is_killed(
    source: SlowSource, arena: Arena, tmp_path: Path
) -> None:
    rank = Rank(arena, source, fetchers=2)
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == 1)
        before = set(mates(tmp_path))
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        assert await_true(lambda: not before & set(mates(tmp_path)))
        # What was in hand then is the workers' to read.
        assert rank.walk(order(), patience=3.0) <= 8
    finally:
        rank.prefetcher.close()


def test_another_epoch_instead(source: SlowSource, arena: Arena, tmp_path: Path) -> None:
    rank = Rank(arena, source, fetchers=3)
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == 2)
        assert rank.walk(order()[:30]) == 0
        rank.prefetcher.reset()
        rank.publish(order(5), epoch=5)
        assert rank.walk(order(5), patience=3.0) <= 12
    finally:
        rank.prefetcher.close()


class Sparse(OneByOne):
    """Some samples cannot be read."""

    def read(self, ids: np.ndarray) -> list[bytes]:
        if np.isin(ids, [7, 77]).any():
            raise SampleCorrupt("cut", [7, 77])
        return super().read(ids)


def test_what_cannot_be_read_is_left_to_the_worker(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    rank = Rank(arena, Sparse(MemorySource(SAMPLES), latency=0.002), fetchers=2)
    try:
        rank.publish(order())
        until(lambda: len(mates(tmp_path)) == 1)
        assert rank.walk(order(), patience=2.0) == 2
        assert arena.claim(np.array([7, 77], np.uint32)).all()
    finally:
        rank.prefetcher.close()


# --- against a model ---


class Puppet:
    """Stands in for a process, and its end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Channel(connection)
        self.pid = 0

    def kill(self) -> None:
        self.channel.close()

    def wait(self) -> int:
        return 0

    def say(self, message: dict[str, Any]) -> None:
        self.channel.send(message)

    def hear(self) -> dict[str, Any]:
        received = self.channel.receive()
        assert received is not None
        return received[0]


class Puppets(Crew[Any]):
    """A crew whose processes are played by the test."""

    def __init__(self) -> None:
        super().__init__(None)
        self.launched: list[Puppet] = []

    def _launch(self) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.launched.append(Puppet(theirs))
        return self.launched[-1], ours


class PuppetRank:
    number = 0

    def __init__(self) -> None:
        self.meter = Meter(np.zeros(3))


def group_at(first: int) -> Group:
    marks = Marks(np.zeros(Marks.bytes(4), np.uint8))
    nothing = np.zeros(0, np.uint32)
    ids, places = np.array([first], np.uint32), np.zeros(1, np.int64)
    return Group(ids, None, first, Segment(0, nothing, None, marks, 1), places, True, first)


class AnyOrder(RuleBasedStateMachine):
    """Whoever asks, claims, finishes and dies when: each group ends done, and once."""

    def __init__(self) -> None:
        super().__init__()
        self.crew, self.rank = Puppets(), PuppetRank()
        self.crew.resize(3)
        self.held: dict[Puppet, dict[int, int]] = {each: {} for each in self.crew.launched}
        self.asking: set[Puppet] = set()
        self.claimed: set[int] = set()  # first accesses of groups
        self.left: list[int] = []
        self.done: list[int] = []
        self.begun = 0

    @rule(who=st.integers(0, 2))
    def ask(self, who: int) -> None:
        puppet = list(self.held)[who]
        puppet.say({"want": True})
        self.asking.add(puppet)
        self.crew.hear()

    @rule()
    def hand_out(self) -> None:
        assert self.crew.has_room == bool(self.asking)
        if not self.asking:
            return
        if self.left:
            first = self.left.pop(0)
        else:
            first, self.begun = self.begun, self.begun + 1
        self.crew.add(self.rank, group_at(first))
        (puppet,) = [each for each in self.asking if select.select([each.channel], [], [], 0)[0]]
        assert len(self.held[puppet]) == min(len(self.held[each]) for each in self.asking)
        order = puppet.hear()
        assert order["ids"] == [first]
        self.asking.remove(puppet)
        self.held[puppet][order["chunk"]] = first

    @rule(who=st.integers(0, 2))
    def claim(self, who: int) -> None:
        puppet = list(self.held)[who]
        for chunk, first in self.held[puppet].items():
            if first not in self.claimed:
                puppet.say({"claimed": chunk, "own": 1})
                self.claimed.add(first)
                break
        self.crew.hear()

    @rule(who=st.integers(0, 2))
    def finish(self, who: int) -> None:
        puppet = list(self.held)[who]
        ready = [c for c, first in self.held[puppet].items() if first in self.claimed]
        if ready:
            said = {"done": ready[-1], "read": 1, "bytes": 10, "fine": True, "cpu": 1.0}
            puppet.say(said)
            self.done.append(self.held[puppet].pop(ready[-1]))
        self.crew.hear()

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        puppet = list(self.held)[who]
        lost = sorted(self.held.pop(puppet).values())
        self.asking.discard(puppet)
        self.claimed -= set(lost)
        puppet.channel.close()
        self.crew.hear()
        assert sorted(int(group.ids[0]) for _, group in self.crew.take_lost()) == lost
        self.left += lost
        self.crew._deaths.clear()
        self.crew.resize(3)
        self.held[self.crew.launched[-1]] = {}

    @invariant()
    def agrees(self) -> None:
        held = [first for each in self.held.values() for first in each.values()]
        assert sorted([*held, *self.left, *self.done]) == list(range(self.begun))
        assert sorted(self.crew.unclaimed(0)) == sorted(set(held) - self.claimed)
        assert self.crew.is_idle == (not held)
        assert self.crew.read_bytes == 10 * len(self.done)

    def teardown(self) -> None:
        self.crew.close()
        for puppet in self.held:
            puppet.kill()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_too_many_deaths_end_in_a_pause() -> None:
    crew = Puppets()
    for _ in range(10):
        crew.resize(1)
        if crew.pids:
            crew.launched[-1].kill()
            crew.hear()
    assert len(crew.launched) == 5
    crew.close()


def test_surplus_ones_end_after_what_they_have_in_hand() -> None:
    crew, rank = Puppets(), PuppetRank()
    crew.resize(2)
    for puppet in crew.launched:
        puppet.say({"want": True})
    crew.hear()
    crew.add(rank, group_at(0))
    crew.add(rank, group_at(1))
    crew.resize(0)
    assert (len(crew.pids), crew.has_room) == (2, False)
    for puppet in crew.launched:
        chunk = puppet.hear()["chunk"]
        said = {"done": chunk, "read": 0, "bytes": 0, "fine": False, "cpu": 0.0}
        puppet.say(said)
        puppet.say({"want": True})
    crew.hear()
    assert (crew.has_room, crew.has_failed) == (False, True)
    crew.resize(0)
    assert not crew.pids
    assert not crew.take_lost()
    crew.close()


# --- how many ---


def headcount_after(most: int, rate_of: dict[int, float], steps: int, busy: float) -> list[int]:
    """Measure again and again, with ``busy`` of a core each; return how many there were."""
    heads, counts = Headcount(most), []
    for _ in range(steps):
        heads.measured(rate_of[heads.wanted], busy * heads.wanted, is_held_back=True)
        counts.append(heads.wanted)
    return counts


def test_processes_are_added_while_each_makes_reading_faster() -> None:
    counts = headcount_after(8, {1: 100.0, 2: 190.0, 3: 270.0, 4: 280.0}, 40, 0.95)
    assert max(counts) == 4
    assert counts[-1] == 3, "the fourth brought too little"


def test_one_that_waits_for_the_storage_needs_no_other() -> None:
    assert set(headcount_after(8, {1: 100.0}, 40, 0.3)) == {1}


def test_no_more_than_allowed() -> None:
    assert max(headcount_after(2, {1: 100.0, 2: 200.0}, 40, 0.95)) == 2


def test_idle_ones_go_one_after_the_other() -> None:
    heads = Headcount(4)
    for _ in range(30):
        heads.measured(100.0 * heads.wanted, 0.95 * heads.wanted, is_held_back=True)
    assert heads.wanted == 4
    counts = []
    for _ in range(20):
        heads.measured(50.0, 0.5, is_held_back=False)
        counts.append(heads.wanted)
    assert counts[-1] == 1
    assert counts[4] >= 3
