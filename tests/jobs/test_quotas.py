"""Bounds and priorities that the operator sets for jobs by their names."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.services import serving
from support.waiting import train_step, until

from jobs.test_admission import MIB, capacity, capacity_of_all, listing, turned_down
from stoker import Cache, Feed
from stoker.cli.root import root
from stoker.errors import CapacityError, ConfigError
from stoker.jobs import Sharing, protocol
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.quotas import Claimant, Quota, divide, quota_for
from stoker.jobs.service import Service
from stoker.node.bandwidth import FetchShare
from stoker.source.held import MemorySource
from stoker.store.arena import Arena


def job(name: str, number: int, wait: float = 0.0, disk: Path | None = None) -> Feed:
    """A job whose cache has 12 MiB and some overhead."""
    source = MemorySource([bytes([number]) * (MIB // 10)] * 120)
    memory = "100%" if disk is None else 2 * MIB
    cache = Cache(memory, prefetch=0, disk=disk, sharing=Sharing(name, wait=wait))
    return Feed(source, 10, cache=cache, recipe="lru")


@pytest.fixture
def service() -> Iterator[Service]:
    quotas = (Quota.parse("ann-*:memory=20MiB,disk=20MiB"), Quota.parse("bob-*:memory=40MiB"))
    with serving(memory=100 * MIB, quotas=quotas) as service:
        yield service


def test_a_quota_is_read_from_its_text() -> None:
    assert Quota.parse("ann-*:memory=1KiB,disk=2KiB,priority=-3") == Quota("ann-*", 1024, 2048, -3)
    assert Quota.parse("a:weight=0.5") == Quota("a", weight=0.5)
    assert Quota.parse("a:b:priority=1") == Quota("a:b", priority=1)
    first, second = Quota("ann-*"), Quota("*")
    assert quota_for("ann-1", 0, [first, second]) is first
    assert quota_for("bob", 0, [first, second]) is second
    assert quota_for("bob", 0, [first]) is None
    assert Quota.parse("a:memory=1KiB,most=4KiB") == Quota("a", 1024, most=4096)
    user, jobs = Quota.parse("user=1234:memory=1KiB"), Quota("user*")
    assert (user.user, jobs.user, Quota("user=root").user) == (1234, None, 0)
    assert quota_for("any", 1234, [user, jobs]) is user
    assert quota_for("user=1234", 99, [user, jobs]) is jobs


@pytest.mark.parametrize(
    "text",
    [
        "ann",
        ":memory=1",
        "a:",
        "a:memory=x",
        "a:cpu=1",
        "a:memory=1,memory=2",
        "a:disk=-1",
        "a:weight=0",
        "a:weight=nan",
        "a:memory=2,most=1",
        "user=:memory=1",
        "user=no-such-user-anywhere:memory=1",
    ],
)
def test_a_quota_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Quota.parse(text)
    assert CliRunner().invoke(root, ["serve", "--quota", text]).exit_code != 0


def test_a_job_gets_what_is_left_of_its_quota_while_others_have_more(service: Service) -> None:
    with job("ann-1", 1) as first, job("ann-2", 2) as second, job("bob-1", 3) as other:
        list(first)
        until(service.holding.keys)
        with pytest.warns(RuntimeWarning, match="no room for more"):
            list(second)
        assert capacity(second) < capacity_of_all(second)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(other)
        until(lambda: len(service.holding.keys()) == 3)
        told = listing()
        [ann, bob] = service.holding.quotas()
        assert 19 * MIB < ann["memory_bytes"] <= 20 * MIB
        assert 12 * MIB < bob["memory_bytes"] < 20 * MIB
        assert 'stoker_quota_memory_limit_bytes{jobs="ann-*"} 20971520' in service.metrics()
        assert "quota of jobs named ann-*: memory" in told
        assert "1 cache in use took" in told
        assert "of the quota of jobs named ann-*, 20.0 MiB" in told


def test_a_job_waits_for_its_quota_and_holds_up_no_other(service: Service) -> None:
    with job("ann-1", 1) as first, job("ann-2", 2, wait=600.0) as second:
        list(first)
        until(service.holding.keys)
        training = threading.Thread(target=list, args=(second,))
        training.start()
        until(turned_down)
        with job("bob-1", 3, wait=600.0) as other:
            list(other)  # there is room for all of it
            assert capacity(other) == capacity_of_all(other)
        first.close()
        training.join(60)
        assert not training.is_alive()
        assert capacity(second) == capacity_of_all(second)


def test_a_job_without_its_disk_cache_is_told_why(service: Service, tmp_path: Path) -> None:
    with (
        job("ann-1", 1, disk=tmp_path / "1") as first,
        job("ann-2", 2, disk=tmp_path / "2") as second,
    ):
        list(first)
        with pytest.warns(RuntimeWarning, match="there will be no disk cache"):
            list(second)
        told = listing()
        assert "ann-2" in told
        assert "has no disk cache: it takes" in told
        assert "the quota of jobs named ann-* is 20.0 MiB of disk" in told
        with job("bob-1", 3, disk=tmp_path / "3") as other, warnings.catch_warnings():
            warnings.simplefilter("error")
            list(other)


def test_the_first_of_those_that_wait_is_that_of_the_highest_priority() -> None:
    holding = Holding(memory=100, quotas=[Quota("urgent", priority=1)])
    assert holding.admit("a", 80, 80, []) is None
    plain, urgent = Asker("plain", waits=True), Asker("urgent", waits=True)
    assert holding.admit("b", 90, 90, [], plain) == 20
    assert holding.admit("c", 30, 30, [], urgent) == 20
    assert holding.admit("b", 15, 15, [], plain) == 20, "there is room, but not for it"
    assert holding.admit("c", 15, 15, [], urgent) is None
    holding.close()


def test_a_later_service_knows_whose_caches_there_are(service: Service) -> None:
    with job("ann-1", 1) as first:
        list(first)
        until(service.holding.keys)
        later = Holding(quotas=[Quota("ann-*", memory=20 * MIB)])
        later.look()
        [told] = later.quotas()
        assert told["memory_bytes"] > 12 * 1e6
        later.close()
    until(lambda: service.holding.idle())
    assert service.holding.admit("d", 15 * MIB, 15 * MIB, [], Asker("ann-3")) is None, "it was idle"
    assert service.holding.keys() == []


@pytest.mark.parametrize("flow", [[0, 1], [1 << 64, 1], [1, 0], [1], "x", 3, [None, None]])
def test_a_share_that_is_none_is_done_without(
    flow: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"room": None, "flow": flow}
    monkeypatch.setattr(protocol, "_ask", lambda *_, **__: answer)
    assert protocol.capacity_allowed("k", 10, 1000, 10.0, []) == (1000, None, None)
    answer["flow"] = [7, 2.0]
    assert protocol.capacity_allowed("k", 10, 1000, 10.0, []).fetch_share == FetchShare(7, 2.0)


# --- lent and given back ---

BORROW = [Quota(f"job {n}", size, most=800) for n, size in enumerate((400, 200, 100, 100))]


def wants(quota: Quota | None, has: float, *, idle: bool = False, least: float = 0.0) -> Claimant:
    return Claimant(quota, least, has, 800.0, idle)


def test_under_pressure_each_quota_has_what_is_its_own() -> None:
    assert divide(800, [wants(quota, 0) for quota in BORROW]).tolist() == [400, 200, 100, 100]
    taken = [wants(BORROW[0], 800), *(wants(quota, 0) for quota in BORROW[1:])]
    assert divide(800, taken).tolist() == [400, 200, 100, 100]


def test_what_is_idle_is_lent_and_stays_where_nobody_wants_it() -> None:
    idle = [wants(BORROW[0], 400, idle=True, least=10), *(wants(q, 100) for q in BORROW[1:])]
    shares = divide(800, idle)
    assert shares[0] == 10, "but for its bookkeeping"
    assert shares.sum() == pytest.approx(800)
    assert (shares[1:] - [200, 100, 100]).tolist() == pytest.approx([390 / 3] * 3)
    full = Claimant(BORROW[1], 0.0, 100.0, 150.0)
    assert divide(800, [idle[0], full]).tolist() == [400, 150]


def test_a_cache_without_a_quota_gives_back_what_others_have_a_right_to_and_no_more() -> None:
    bound = Quota("bound", memory=300)
    assert divide(800, [wants(None, 800), wants(bound, 0)]).tolist() == [500, 300]
    assert divide(800, [wants(bound, 300), wants(None, 500), wants(None, 0)]).tolist() == [
        *(300, 500),
        0,
    ]


def test_what_is_borrowed_goes_by_priority_and_weight() -> None:
    first, heavy, light = (
        Quota("first", 100, priority=1, most=300),
        Quota("heavy", 100, weight=3.0, most=800),
        Quota("light", 100, most=800),
    )
    shares = divide(800, [wants(first, 0), wants(heavy, 0), wants(light, 0)])
    assert shares.tolist() == pytest.approx([300, 100 + 225, 100 + 75])


def test_rights_to_more_than_there_is_shrink_in_proportion() -> None:
    quotas = Quota("a", 600, most=800), Quota("b", 1000, most=1000)
    assert divide(800, [wants(quota, 0) for quota in quotas]).tolist() == [300, 500]
    assert divide(800, []).tolist() == []


class Training:
    """A job that trains in a thread until the end; each sample must be its own."""

    def __init__(
        self, name: str, number: int, disk: Path | None = None, memory: str | int = "100%"
    ) -> None:
        self.may_train = threading.Event()
        self.may_train.set()
        self._is_over = threading.Event()
        self._sample = bytes([number]) * (MIB // 10)
        source = MemorySource([self._sample] * 240)
        cache = Cache(memory, prefetch=0, disk=disk, sharing=Sharing(name), stands_aside=False)
        self._feed = Feed(source, 10, cache=cache, recipe="lru", decode=bytes)
        self._thread = threading.Thread(target=self._train)
        self._errors: list[BaseException] = []

    def _train(self) -> None:
        try:
            while not self._is_over.is_set():
                for batch in self._feed:
                    assert all(sample == self._sample for sample in batch.data)
                    train_step(0.005)
                    self.may_train.wait()
                    if self._is_over.is_set():
                        break
        except BaseException as error:
            self._errors.append(error)

    @property
    def held(self) -> float:
        """Payload in its cache, in MiB."""
        cached = self._feed._session.cached
        return 0.0 if cached is None else cached.store.tier.stats()["payload_bytes"] / MIB

    def limit(self, payload: int) -> None:
        cached = self._feed._session.cached
        assert cached is not None
        cached.store.tier.arena.limit(payload)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.may_train.set()
        self._thread.join()
        self._feed.close()
        assert self._errors == []


@contextlib.contextmanager
def lending(*quotas: str) -> Iterator[Service]:
    """A service with 32 MiB: one job of 24 MB and a third of another one."""
    with serving(memory=32 * MIB, quotas=tuple(map(Quota.parse, quotas))) as service:
        yield service


def test_a_running_job_borrows_and_gives_back_what_is_not_its_own() -> None:
    with (
        lending("ann:memory=8MiB,most=32MiB", "bob:memory=22MiB,most=32MiB") as service,
        Training("ann", 1) as ann,
    ):
        until(lambda: ann.held > 20)
        [borrowed, _] = service.holding.quotas()
        assert borrowed["borrowed_bytes"] > 12 * MIB
        assert 'stoker_quota_memory_borrowed_bytes{jobs="ann"}' in service.metrics()
        assert "of it borrowed" in listing()
        with Training("bob", 2) as bob:
            until(lambda: bob.held > 16 and ann.held < 9)
            assert service.holding.limits()["memory_bytes"] <= 33 * MIB
            until(lambda: "jobs named ann have 8.0 MiB by right" in listing())
            assert "stoker_cache_limit_bytes" in service.metrics()
            bob.may_train.clear()
            until(lambda: ann.held > 20)  # while bob is idle
            until(lambda: "it is idle, and lent to others" in listing())
            bob.may_train.set()
            until(lambda: bob.held > 16 and ann.held < 9)
        until(lambda: ann.held > 20)


@pytest.mark.filterwarnings("ignore:the cache has")  # bob's quota is less than it asks for
def test_a_running_job_without_a_quota_gives_back_what_a_new_one_has_a_right_to() -> None:
    with lending("bob:memory=20MiB") as service, Training("plain", 1) as plain:
        until(lambda: plain.held > 20)
        with Training("bob", 2) as bob:
            until(lambda: bob.held > 14 and plain.held < 12)
            until(lambda: "others have a right to the rest" in listing())
            with job("late", 3) as late, pytest.raises(CapacityError, match="has room for 0 B"):
                list(late)
            assert service.holding.limits()["memory_bytes"] <= 33 * MIB


def test_what_was_limited_grows_when_a_later_service_has_no_quotas() -> None:
    with Training("ann", 1) as ann:
        until(lambda: ann.held > 20)
        ann.limit(8 * MIB)  # as a service that has ended left it
        until(lambda: ann.held < 9)
        with lending():
            until(lambda: ann.held > 20)


def test_a_limit_is_raised_though_samples_in_the_way_kept_all_the_memory() -> None:
    """It stayed: the cache had the memory that it was due, and kept less in it."""
    with job("any", 1) as training:
        list(training)
        cached = training._session.cached
        assert cached is not None
        arena: Arena = cached.store.tier.arena
        arena.discard(range(120))
        whole = arena.memory_bytes
        rooms = arena.reserve(range(120), np.full(120, MIB // 10))
        assert rooms.reserved().all()
        assert arena.limit(MIB) > 0.98 * whole
        holding = Holding(memory=32 * MIB)
        holding.look()
        holding.balance()
        assert arena.limit_bytes == arena.capacity_bytes
        holding.close()
        del rooms


def test_the_quota_of_the_user_is_for_all_of_its_jobs() -> None:
    with (
        lending(f"user={os.geteuid()}:memory=20MiB") as service,
        job("any", 1) as first,
        job("other", 2) as second,
    ):
        list(first)
        until(service.holding.keys)
        with pytest.warns(RuntimeWarning, match="no room for more"):
            list(second)
        assert f"quota of user {os.geteuid()}: memory" in listing()
