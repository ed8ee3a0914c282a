"""Bounds and priorities that the operator sets for jobs by their names."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.waiting import until

from jobs.test_admission import MIB, capacity, capacity_of_all, listing, turned_down
from stoker import Cache, Feed
from stoker.cli.root import root
from stoker.errors import ConfigError
from stoker.jobs import Sharing, protocol
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.quotas import Quota, quota_for
from stoker.jobs.service import Service, ServiceSettings
from stoker.node.bandwidth import FetchShare
from stoker.source.held import MemorySource


def job(name: str, number: int, wait: float = 0.0, disk: Path | None = None) -> Feed:
    """A job whose cache has 12 MiB and some overhead."""
    source = MemorySource([bytes([number]) * (MIB // 10)] * 120)
    memory = "100%" if disk is None else 2 * MIB
    cache = Cache(memory, prefetch=0, disk=disk, sharing=Sharing(name, wait=wait))
    return Feed(source, 10, cache=cache, recipe="lru")


@pytest.fixture
def service() -> Iterator[Service]:
    quotas = (Quota.parse("ann-*:memory=20MiB,disk=20MiB"), Quota.parse("bob-*:memory=40MiB"))
    with Service(ServiceSettings(memory=100 * MIB, quotas=quotas)) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        yield service
        service.stop()
        thread.join()


def test_a_quota_is_read_from_its_text() -> None:
    assert Quota.parse("ann-*:memory=1KiB,disk=2KiB,priority=-3") == Quota("ann-*", 1024, 2048, -3)
    assert Quota.parse("a:weight=0.5") == Quota("a", weight=0.5)
    assert Quota.parse("a:b:priority=1") == Quota("a:b", priority=1)
    first, second = Quota("ann-*"), Quota("*")
    assert quota_for("ann-1", [first, second]) is first
    assert quota_for("bob", [first, second]) is second
    assert quota_for("bob", [first]) is None


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
    assert protocol.capacity_allowed("k", 10, 1000, 10.0, []) == (1000, None)
    answer["flow"] = [7, 2.0]
    assert protocol.capacity_allowed("k", 10, 1000, 10.0, []).fetch_share == FetchShare(7, 2.0)
