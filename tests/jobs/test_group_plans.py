"""What members of a group tell that they need, what stays for it, and what hostile ones can do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.groups import (
    act_as_member,
    files_of,
    joined,
    make_folder,
    needs_group,
    read_for,
    serving,
    told,
)
from support.users import OTHER, begin_as_other, needs_two_users
from support.waiting import until

from stoker.jobs import group_plans
from stoker.jobs.group_cache import GroupCache
from stoker.jobs.group_files import SharedFolder
from stoker.jobs.group_plans import Coming, Job, Plans
from stoker.jobs.quotas import Quota
from stoker.jobs.service import Service, ServiceSettings
from stoker.pool import group_pool
from stoker.pool.group_pool import VERSION, GroupPool

THIRD = OTHER + 1
EVERY = np.arange(30, dtype=np.uint32)
IDS = st.lists(st.integers(0, 9), max_size=25)


@pytest.fixture
def root(place: Path) -> Path:
    return make_folder(place)


# --- the order ---


class Model:
    """The accesses that a job has before it, one by one."""

    def __init__(self, ids: list[int], length: int, is_last: bool) -> None:
        self.ids, self.is_over = ids, [False] * len(ids)
        self.position = 0
        self.unknown = 2**53 if is_last else len(ids) + length // 2

    def next_use(self, sample: int) -> int:
        for at, each in enumerate(self.ids):
            if each == sample and not self.is_over[at]:
                return at
        return self.unknown

    def take(self, samples: list[int]) -> None:
        for sample in samples:
            at = self.next_use(sample)
            if at < len(self.ids):
                self.is_over[at] = True

    def pass_by(self, position: int) -> None:
        self.position = max(self.position, min(position, len(self.ids)))
        self.is_over[: self.position] = [True] * self.position


@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(st.tuples(IDS, st.integers(0, 25), st.booleans()), min_size=1, max_size=4),
    events=st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 30), st.sets(st.integers(0, 9))),
        max_size=12,
    ),
)
def test_the_merged_order_is_that_of_the_next_access_of_any_job(
    plans: list[tuple[list[int], int, bool]],
    events: list[tuple[int, bool, int, set[int]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_plans.time, "monotonic", lambda: 1000.0)  # paces stay unknown: equal
        ours, every = Plans(10, 1 << 20), np.arange(10, dtype=np.uint32)
        models = []
        for number, (ids, length, is_last) in enumerate(plans):
            assert ours.reserve((number % 2, number), len(ids))
            ours.tell((number % 2, number), np.array(ids, np.uint32), length, is_last)
            models.append(Model(ids, length, is_last))
        for chosen, takes, position, samples in events:
            number = chosen % len(models)
            job, model = (number % 2, number), models[number]
            if takes:
                ours.take(job, np.array(sorted(samples), np.uint32))
                model.take(sorted(samples))
            else:
                ours.pass_by(job, position)
                model.pass_by(position)
        expected = [
            min(model.next_use(sample) - model.position for model in models) for sample in range(10)
        ]
        assert ours.keys(every).tolist() == [-(1000.0 + each) for each in expected]
        for model in models[:1]:  # as it will be once the first job has taken a sample
            for sample in range(10):
                before = list(model.is_over)
                model.take([sample])
                left = min(each.next_use(sample) - each.position for each in models)
                model.is_over = before
                wanted = np.array([sample], np.uint32)
                assert ours.keys(wanted, (0, 0)).tolist() == [-(1000.0 + left)]


def test_a_faster_job_needs_what_comes_later_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(group_plans.time, "monotonic", lambda: now[0])
    plans, order = Plans(10, 1 << 20), np.arange(10, dtype=np.uint32)
    for number, ids in enumerate((order, order[::-1])):
        plans.tell((0, number), np.ascontiguousarray(ids), 10, True)
    now[0] += 1.0
    plans.pass_by((0, 0), 1)
    plans.pass_by((0, 1), 4)  # which has 5 to 0 before it, at four times the pace
    left = np.array([5, 4, 1], np.uint32)
    assert (-plans.keys(left) - now[0]).tolist() == [0.0, 0.25, 0.0]


def test_plans_of_a_user_take_a_part_of_the_memory_and_of_the_places() -> None:
    asked: list[int] = []
    plans = Plans(1000, 1 << 40, lambda size: asked.append(size) or True)
    most = (1 << 40) // 16
    assert not plans.reserve((1, 1), most // 8)  # of 8 bytes each: all that there is for plans
    assert plans.reserve((1, 1), most // 8 // 5)
    assert not plans.reserve((1, 2), most // 8 // 5)
    assert plans.reserve((2, 1), most // 8 // 5)
    assert plans.memory == sum(asked)
    plans.leave((1, 1))
    for number in range(32):
        assert plans.reserve((1, number), 10)
    assert not plans.reserve((1, 32), 10)
    assert plans.reserve((3, 32), 10)


def test_a_plan_that_the_service_has_no_memory_for_is_not_taken() -> None:
    plans = Plans(1000, 1 << 30, lambda size: size < 5000)
    assert plans.reserve((1, 1), 10)
    assert not plans.reserve((1, 2), 1000)
    assert plans.memory == Coming.bytes(10, 1000)


# --- what stays ---


def begin(pool: GroupPool, ids: np.ndarray, **how: bool) -> None:
    """Tell a plan, and wait until the service knows it."""
    known = told()[0]["plans"]
    pool.begin_plan(ids.astype(np.uint32), len(ids), **({"is_last": True} | how))
    until(lambda: told()[0]["plans"] == known + 1)


def walk(pool: GroupPool, ids: np.ndarray) -> int:
    """Be a job that has these accesses; return how many it had to read by itself."""
    alone = 0
    for at in range(0, len(ids), 5):
        found = pool.find(ids[at : at + 5].astype(np.uint32))
        alone += int(np.count_nonzero(~found.found))
        pool.pass_by(at + 5)
    return alone


@needs_two_users
@needs_group
def test_what_users_need_again_stays_for_all_and_is_read_once(place: Path, root: Path) -> None:
    """Two users, of whom one needs what the other does; nobody needs what filled the cache."""
    files = files_of(root)

    def train(ids: np.ndarray, goes_on: int) -> None:
        pool = GroupPool(place / "s.sock", files)
        pool.begin_plan(ids, len(ids), is_last=True)
        os.read(goes_on, 1)  # once both have told
        assert walk(pool, ids) == 0
        pool.close()

    with serving(place, f"{root}=50%"):
        filler = GroupPool(place / "s.sock", files)
        filler.find(EVERY)
        before = read_for(os.geteuid())
        assert 0 < before < len(EVERY)
        waits, goes_on = os.pipe()
        children = [
            begin_as_other(partial(train, np.tile(ids, 3), waits), user=user, groups=[65534])
            for user, ids in ((OTHER, EVERY[20:30]), (THIRD, EVERY[18:28]))
        ]
        until(lambda: told()[0]["plans"] == 2)
        os.write(goes_on, b"gg")
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        there = set(np.flatnonzero(filler.find(EVERY).found))
        assert there >= set(range(20, 28))  # which both needed; one may have left before the other
        read = read_for(OTHER) + read_for(THIRD)
        assert read <= len(range(18, 30))
        until(lambda: told()[0]["plans"] == 0)


@needs_group
def test_a_job_without_a_plan_displaces_nothing_that_a_plan_needs(place: Path, root: Path) -> None:
    with serving(place, f"{root}=50%"):
        planned, plain = (GroupPool(place / "s.sock", files_of(root)) for _ in range(2))
        plan = np.tile(EVERY[:12], 4)
        begin(planned, plan)
        assert walk(planned, plan[:12]) == 0
        read = read_for(os.geteuid())
        for _ in range(3):
            plain.find(EVERY[12:])
        assert planned.find(EVERY[:12]).found.all()
        assert not planned.find(EVERY[:12]).fetched.any()
        assert walk(planned, plan[12:]) == 0
        assert read_for(os.geteuid()) - read <= len(EVERY) - 12


@needs_group
def test_what_is_used_last_makes_room(place: Path, root: Path) -> None:
    """With half of the samples kept, a third of the accesses hit as they come round again."""
    with serving(place, f"{root}=50%"):
        pool = GroupPool(place / "s.sock", files_of(root))
        plan = np.tile(EVERY, 4)
        begin(pool, plan)
        alone = walk(pool, plan)
        read = read_for(os.geteuid()) + alone
        # Belady's rule: of each round all but half is read, in place of what was used just now.
        assert len(EVERY) + 3 * 14 <= read <= len(EVERY) + 3 * 19


@needs_group
def test_no_plan_is_told_where_all_is_kept(place: Path, root: Path) -> None:
    with serving(place, str(root)):
        pool = GroupPool(place / "s.sock", files_of(root))
        pool.begin_plan(EVERY, len(EVERY), is_last=False)
        teller = pool._teller
        assert teller is not None
        assert pool.find(EVERY).fetched.all()
        until(lambda: not pool._is_planned and teller._link is None)
        assert told()[0]["plans"] == 0


# --- quotas ---

BOUNDED, QUOTA = 4711, 8000


@pytest.fixture
def bounded(place: Path, root: Path) -> Iterator[GroupCache]:
    """A cache of half of the samples, of which one user may have some five read for him."""
    quota = Quota(f"user={BOUNDED}", QUOTA)
    with Service(ServiceSettings(quotas=(quota,))) as service:
        cache = GroupCache(root, "50%", allow=service._allowance)
        service._groups._caches[SharedFolder(root)] = cache
        yield cache


def need(cache: GroupCache, job: Job, ids: np.ndarray) -> None:
    """Tell that ``job`` needs these over and over, and nothing else."""
    plan = np.tile(ids, 3).astype(np.uint32)
    assert cache.makes_room_for_plan(job, len(plan))
    cache.tell(job, plan, len(plan), True)


def kept(cache: GroupCache) -> np.ndarray:
    return np.flatnonzero(cache._arena.contains(EVERY)).astype(np.uint32)


def paid(cache: GroupCache, user: int) -> int:
    """Bytes of what is there that was read for a user."""
    ids = kept(cache)
    return int(cache._sizes[ids[cache._payers[ids] == user]].sum())


def test_what_leaves_for_another_user_counts_no_more_for_whom_it_was_read(
    bounded: GroupCache,
) -> None:
    cache, ours, theirs = bounded, (BOUNDED, 1), (THIRD, 1)
    for _ in range(2):
        for job in (ours, theirs):  # the first time there is room, and then each displaces
            lacks = np.setdiff1d(EVERY, kept(cache))[:8]
            need(cache, job, lacks)
            cache.bring(job, lacks)
            until(lambda: cache.read_for().total() == cache.told()["payload_bytes"])
            assert cache.read_for()[BOUNDED] == paid(cache, BOUNDED) <= QUOTA
            there = cache._arena.contains(lacks)
            if job is ours:
                assert there.any() and paid(cache, BOUNDED) > QUOTA // 2
            else:
                assert there.all()
            cache.leave(job)
        cache.bring(theirs, EVERY)  # what is left of room
        need(cache, theirs, np.setdiff1d(EVERY, kept(cache)))
        cache.bring(theirs, EVERY)
        assert paid(cache, BOUNDED) == 0
        until(lambda: cache.read_for()[BOUNDED] == 0)
        cache.leave(theirs)


def test_what_left_and_comes_again_counts_for_the_user_who_needs_it_now(root: Path) -> None:
    cache = GroupCache(root, "50%")
    try:
        cache.bring((1, 1), EVERY)
        had = kept(cache)
        need(cache, (2, 1), np.setdiff1d(EVERY, had))
        cache.bring((2, 1), EVERY)
        left = np.setdiff1d(had, kept(cache))
        cache.leave((2, 1))
        need(cache, (3, 1), left)
        cache.bring((3, 1), left)
        again = np.intersect1d(left, kept(cache))
        assert len(again) and set(cache._payers[again]) == {3}
    finally:
        cache.close()


def test_quotas_hold_while_plans_of_many_displace_each_others_samples(bounded: GroupCache) -> None:
    cache, failed = bounded, []

    def train(user: int, number: int) -> None:
        rng, job = np.random.default_rng(number), (user, number)
        try:
            for _ in range(40):
                need(cache, job, rng.permutation(EVERY)[:10])
                cache.bring(job, rng.permutation(EVERY)[:6])
                assert paid(cache, BOUNDED) <= QUOTA and cache.read_for()[BOUNDED] <= QUOTA
                if rng.random() < 0.3:
                    cache.leave(job)
            cache.leave(job)
        except BaseException as error:
            failed.append(error)

    users = (BOUNDED, BOUNDED, OTHER, THIRD)
    threads = [threading.Thread(target=train, args=each[::-1]) for each in enumerate(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    until(lambda: cache.read_for().total() == cache.told()["payload_bytes"])
    for user in users:
        assert cache.read_for()[user] == paid(cache, user)


# --- deaths ---


@needs_group
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_plan_of_a_member_that_died_counts_no_more(
    place: Path, root: Path, how: signal.Signals
) -> None:
    files = files_of(root)

    def need_all() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # before anybody may send it
        pool = GroupPool(place / "s.sock", files)
        begin(pool, np.tile(EVERY[:15], 20))
        walk(pool, EVERY[:15])
        signal.pause()

    with serving(place, f"{root}=40%"):
        child = begin_as_other(need_all, user=os.geteuid(), groups=[65534])
        until(lambda: told()[0]["plans"] == 1)
        until(lambda: read_for(os.geteuid()) >= 8)
        os.kill(child, how)
        os.waitpid(child, 0)
        until(lambda: told()[0]["plans"] == 0)
        pool = GroupPool(place / "s.sock", files)
        begin(pool, np.tile(EVERY[20:], 2))
        assert walk(pool, EVERY[20:]) == 0
        assert not pool.find(EVERY[20:]).fetched.any()


@needs_group
def test_the_next_service_is_told_the_plan(place: Path, root: Path) -> None:
    pool = GroupPool(place / "s.sock", files_of(root))
    with serving(place, f"{root}=50%"):
        begin(pool, np.tile(EVERY, 2))
        pool.pass_by(10)
    pool.pass_by(20)
    with serving(place, f"{root}=50%"):
        pool.pass_by(25)  # by this it sees that the service went
        until(lambda: told()[0]["plans"] == 1)


@needs_group
def test_a_pool_that_nobody_has_any_more_withdraws_its_plan(place: Path, root: Path) -> None:
    with serving(place, f"{root}=50%"):
        pool = GroupPool(place / "s.sock", files_of(root))
        begin(pool, EVERY)
        thread = pool._teller._thread if pool._teller is not None else threading.Thread()
        del pool
        until(lambda: told()[0]["plans"] == 0)
        until(lambda: not thread.is_alive())


@needs_group
def test_a_service_that_hangs_holds_up_no_training(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def wait(cache: GroupCache, job: Job, accesses: int) -> bool:
        hangs.set()
        assert goes_on.wait(60)
        return False

    monkeypatch.setattr(GroupCache, "makes_room_for_plan", wait)
    with serving(place, f"{root}=50%"):
        pool = GroupPool(place / "s.sock", files_of(root))
        pool.begin_plan(EVERY, len(EVERY), is_last=False)
        assert hangs.wait(60)
        pool.pass_by(5)
        pool.begin_plan(EVERY, len(EVERY), is_last=True)
        assert pool.find(EVERY[:5]).found.all()
        pool.close()
        goes_on.set()


# --- a hostile member ---


def line(**message: Any) -> bytes:
    return json.dumps({"stoker": VERSION, **message}).encode() + b"\n"


def body(*ids: int) -> bytes:
    return np.array(ids, np.uint32).tobytes()


PLAN = line(plan=3, length=3, job=7)


@needs_group
@pytest.mark.parametrize(
    "said",
    [
        line(plan=-1, length=3, job=7),
        line(plan=2**40, length=3, job=7),
        line(plan=3, length=-3, job=7),
        line(plan=3, length=1e99, job=7),
        line(plan=True, length=3, job=7),
        line(plan=[3], length=3, job=7),
        line(plan=3, length=3, job=-7),
        line(plan=3, length=3, job=2**70),
        line(plan=3, length=3, job="all"),
        PLAN + body(0, 1, 30),
        PLAN + body(0, 1, 2**32 - 1),
        PLAN + body(0, 1, 2) + line(plan=3, length=3, job=8),
        line(took=4097, job=7),
        line(took=1, job=7) + body(30),
        line(at=-1, job=7),
        line(at=1.5, job=7),
        line(job=7),
        b"x" * (1 << 18),
    ],
)
def test_a_plan_that_makes_no_sense_ends_only_that_connection(
    place: Path, root: Path, said: bytes
) -> None:
    files = files_of(root)
    with serving(place, f"{root}=50%"):
        with joined(place / "s.sock", files) as connection:
            connection.settimeout(20)
            with contextlib.suppress(ConnectionError):
                connection.sendall(said)
                while connection.recv(1 << 16):
                    pass
        until(lambda: told()[0]["plans"] == 0)
        pool = GroupPool(place / "s.sock", files)
        begin(pool, EVERY)
        assert pool.find(EVERY[:5]).fetched.all()


@needs_group
def test_a_plan_that_is_too_large_is_not_taken_and_takes_no_memory(place: Path, root: Path) -> None:
    with serving(place, f"{root}=50%") as service:
        memory = service._groups.memory
        with joined(place / "s.sock", files_of(root)) as connection:
            for _ in range(3):
                connection.sendall(line(plan=1 << 31, length=30, job=7))
                assert json.loads(connection.recv(1 << 16))["send"] is False
            connection.sendall(line(bring=[1, 2], job=7))
            assert json.loads(connection.recv(1 << 16))["read"] == [1, 2]
            assert service._groups.memory == memory


@needs_group
def test_a_plan_that_never_comes_holds_its_memory_no_longer_than_its_connection(
    place: Path, root: Path
) -> None:
    with serving(place, f"{root}=50%") as service:
        memory = service._groups.memory
        with joined(place / "s.sock", files_of(root)) as connection:
            connection.sendall(line(plan=1 << 20, length=30, job=7))
            assert json.loads(connection.recv(1 << 16))["send"] is True
            connection.sendall(body(*range(30)))
            assert service._groups.memory > memory
        until(lambda: service._groups.memory == memory)


@needs_group
def test_progress_of_a_job_that_told_no_plan_is_nothing(place: Path, root: Path) -> None:
    with serving(place, f"{root}=50%"), joined(place / "s.sock", files_of(root)) as connection:
        connection.sendall(line(at=10**12, job=9) + line(took=2, job=9) + body(0, 29))
        connection.sendall(PLAN)
        assert json.loads(connection.recv(1 << 16))["send"] is True
        connection.sendall(body(0, 1, 2) + line(at=2**53, job=7) + line(bring=[0], job=7))
        assert json.loads(connection.recv(1 << 16))["read"] == [0]
        assert told()[0]["plans"] == 1


@needs_two_users
@needs_group
def test_a_plan_of_another_user_with_the_same_number_is_another(place: Path, root: Path) -> None:
    files = files_of(root)

    def attack() -> None:
        with joined(place / "s.sock", files) as connection:
            connection.sendall(line(plan=0, length=0, job=7))
            assert json.loads(connection.recv(1 << 16))["send"] is True
            connection.sendall(line(at=2**50, job=7) + line(bring=[], job=7))
            assert json.loads(connection.recv(1 << 16))["planned"] is True

    with serving(place, f"{root}=50%"), joined(place / "s.sock", files) as connection:
        connection.sendall(PLAN)
        assert json.loads(connection.recv(1 << 16))["send"] is True
        connection.sendall(body(0, 1, 2))
        act_as_member(OTHER, attack)
        connection.sendall(line(bring=[], job=7))
        assert json.loads(connection.recv(1 << 16))["planned"] is True


@needs_two_users
@needs_group
def test_a_flood_of_messages_holds_up_no_other_member(place: Path, root: Path) -> None:
    files = files_of(root)

    def flood(is_on: Callable[[], object]) -> None:
        with joined(place / "s.sock", files) as connection:
            connection.sendall(line(plan=300, length=30, job=7))
            connection.recv(1 << 16)
            connection.sendall(np.tile(EVERY, 10).tobytes())
            words = line(took=30, job=7) + EVERY.tobytes() + line(at=1, job=7)
            is_on()
            while True:
                connection.sendall(100 * words)

    reads, writes = os.pipe()
    with serving(place, f"{root}=50%"):
        floods = [
            begin_as_other(lambda: flood(lambda: os.write(writes, b"f")), groups=[65534])
            for _ in range(2)
        ]
        try:
            assert os.read(reads, 1) + os.read(reads, 1) == b"ff"
            pool = GroupPool(place / "s.sock", files)
            begin(pool, np.tile(EVERY[:10], 3))
            walk(pool, np.tile(EVERY[:10], 3))
            assert pool.stats()["pool_errors"] == 0
        finally:
            for each in floods:
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
        until(lambda: told()[0]["plans"] <= 1)


@needs_group
def test_what_was_taken_is_not_said_to_a_service_that_does_not_listen(
    place: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to wait: then the service learns of it by the progress."""
    monkeypatch.setattr(group_pool, "_AGAIN", 60.0)
    pool = GroupPool(place / "s.sock", files_of(root))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(b"x" * 4096)
        pool._idle.append(ours)
        pool._say_taken(EVERY)
        assert pool._idle == [ours]
        pool._idle.clear()
