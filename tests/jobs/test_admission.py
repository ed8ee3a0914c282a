"""Jobs for which the service has no room: they wait or get less, and `stoker ls` says why."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
from click.testing import CliRunner
from support.services import serving
from support.waiting import until

from stoker import Cache, Feed
from stoker.cli.root import root
from stoker.errors import ConfigError
from stoker.jobs import Sharing
from stoker.jobs.holding import Asker, Holding
from stoker.jobs.protocol import ask
from stoker.source.held import MemorySource

MIB = 1 << 20
ROOM = 20 * MIB


def job(number: int, wait: float = 0.0, samples: int = 120) -> Feed:
    """A job whose cache has 12 MiB and some overhead."""
    source = MemorySource([bytes([number]) * (MIB // 10)] * samples)
    cache = Cache("100%", prefetch=0, sharing=Sharing(f"job {number}", wait=wait))
    return Feed(source, 10, cache=cache, recipe="lru")


def capacity(feed: Feed) -> int:
    assert feed._session.cached is not None
    return int(feed._session.cached.store.tier.stats()["capacity_bytes"])


def listing() -> str:
    result = CliRunner().invoke(root, ["ls"], terminal_width=200)
    assert result.exit_code == 0, result.output
    return result.output


def turned_down() -> list[dict[str, Any]]:
    return list(ask("list")["turned_down"])


def test_a_job_waits_until_there_is_room_and_ls_says_for_what() -> None:
    with serving(memory=ROOM) as service, job(1) as first:
        list(first)
        until(service.holding.keys)
        second = job(2, wait=600.0)
        training = threading.Thread(target=list, args=(second,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it gets all that it asked for
            training.start()
            until(turned_down)
            [told] = turned_down()
            assert (told["job"], told["waits"]) == ("job 2", True)
            assert told["wanted_bytes"] > 12 * 1e6 > told["room_bytes"]
            assert "has waited" in listing()
            assert "1 cache in use took" in listing()
            first.close()
            training.join(60)
        assert not training.is_alive()
        assert capacity(second) == capacity_of_all(second)
        assert turned_down() == []
        second.close()


def capacity_of_all(feed: Feed) -> int:
    return int(feed._session.setup.capacity)


def test_a_job_that_does_not_wait_gets_less_and_ls_says_why() -> None:
    with serving(memory=ROOM) as service, job(1) as first:
        list(first)
        until(service.holding.keys)
        with job(2) as second, pytest.warns(RuntimeWarning, match="no room for more"):
            list(second)
            assert capacity(second) < capacity_of_all(second)
            assert "job 2" in listing()
            assert "asked for: 1 cache in use took" in listing()


def test_waiting_ends_after_the_time_that_was_given() -> None:
    with serving(memory=ROOM) as service, job(1) as first:
        list(first)
        until(service.holding.keys)
        began = time.monotonic()
        with job(2, wait=0.6) as second, pytest.warns(RuntimeWarning, match="no room for more"):
            list(second)
            assert time.monotonic() - began >= 0.6
            assert [each["waits"] for each in turned_down()] == [False]


def test_what_never_fits_is_not_waited_for() -> None:
    less = pytest.warns(RuntimeWarning, match="no room for more")
    with serving(memory=8 * MIB), job(1, wait=3600.0) as only, less:
        list(only)
        assert capacity(only) < capacity_of_all(only)


def test_the_job_that_has_waited_longest_is_first(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = Holding(memory=100)
    assert holding.admit("a", 80, 80, []) is None
    waits = Asker(waits=True)
    assert holding.admit("large", 90, 90, [], waits) == 20
    assert holding.admit("small", 15, 15, [], waits) == 20, "there is room, but others were first"
    assert [each["why"] for each in holding.turned_down()][1].startswith("another job has waited")
    assert holding.admit("other", 15, 15, []) is None, "who does not wait takes what there is"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    assert holding.admit("small", 5, 5, [], waits) is None, "the large one asks no more"
    assert holding.turned_down() == []
    holding.close()


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf")])
def test_a_wait_that_is_none_is_refused(wait: float) -> None:
    with pytest.raises(ConfigError, match="wait="):
        Sharing(wait=wait)
