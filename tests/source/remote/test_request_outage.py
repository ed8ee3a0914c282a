"""What processes know together of an outage, and how long they try again in it."""

from __future__ import annotations

import pickle

import pytest
from support.passing import passed_on

from stoker.source import Retry
from stoker.source.remote import request
from stoker.source.remote.request import Outage

RETRY = Retry(deadline=100.0, unanswered=5.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that an outage goes by, to be set."""
    now = [1000.0]
    monkeypatch.setattr(request.time, "monotonic", lambda: now[0])
    return now


def test_newcomer_1_an_outage_lasts_until_something_succeeds(clock: list[float]) -> None:
    outage = Outage()
    assert outage.fail(RETRY) == 1000
    clock[0] = 1090
    outage.answer()
    assert outage.fail(RETRY) == 1000
    outage.end()
    assert outage.fail(RETRY) == 1090


def test_newcomer_1_what_failed_long_ago_is_another_outage(clock: list[float]) -> None:
    outage = Outage()
    outage.fail(RETRY)
    clock[0] = 1100.5
    assert outage.fail(RETRY) == 1100.5


def test_newcomer_1_how_long_a_call_tries(clock: list[float]) -> None:
    outage = Outage()
    since = outage.fail(RETRY)
    assert outage.limit(RETRY, since, called=999, unreachable=True) == 1005
    assert outage.limit(RETRY, since, called=1050, unreachable=True) == 1005
    assert outage.limit(RETRY, since, called=999, unreachable=False) == 1100
    outage.answer()
    assert outage.limit(RETRY, since, called=999, unreachable=True) == 1100
    assert outage.limit(RETRY, since, called=1050, unreachable=True) == 1100
    assert outage.limit(RETRY, since, called=1099, unreachable=True) == 1104
    hasty = Retry(deadline=1.0)
    assert outage.limit(hasty, since, called=1010, unreachable=True) == 1011


def test_newcomer_1_children_share_it_and_copies_know_that_it_answered() -> None:
    outage = Outage()
    outage.end()
    child = passed_on(outage)
    copy = pickle.loads(pickle.dumps(outage))
    since = outage.fail(RETRY)
    assert child.fail(RETRY) == since
    assert child.has_answered
    assert copy.has_answered
    assert copy.fail(RETRY) > since
    assert not pickle.loads(pickle.dumps(Outage())).has_answered
