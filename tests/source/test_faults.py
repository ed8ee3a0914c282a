"""What a source makes of a server that fails: retries, deadlines, typed errors, hedging, limits."""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import pytest
from support.bad_server import BadServer
from support.passing import passed_on
from support.waiting import until

from stoker.errors import ConfigError, SampleCorrupt, SampleNotFound, SourceUnavailable
from stoker.source import ObjectSource, Pace, Retry

QUICK = Retry(deadline=20.0, first=0.01, longest=0.2)
IMPATIENT = Retry(deadline=0.5, first=0.02)


def source_of(server: BadServer, number: int = 20, **how: Any) -> ObjectSource:
    how = {"retry": QUICK, "concurrency": 8, **how}
    options = {"allow_http": True, "read_timeout": "2s", **how.pop("options", {})}
    keys = [f"{index:03d}" for index in range(number)]
    source = ObjectSource(
        server.url, keys, storage_options=options, pace=Pace(**how), listing_max_age=0
    )
    return source


def expected(server: BadServer, number: int = 20) -> list[bytes]:
    return [server.body(f"{index:03d}") for index in range(number)]


@pytest.mark.parametrize("trouble", ["503", "500", "429", "cut", "reset"])
def test_what_passes_is_retried(bad_server: BadServer, trouble: str) -> None:
    source = source_of(bad_server)
    bad_server.plan = lambda key, turn, head: trouble if turn < int(key) % 3 else None
    assert source.read(range(20)) == expected(bad_server)
    failed = sum(index % 3 for index in range(20))
    assert sum(bad_server.asked.values()) == 20 + failed, "each as often as it takes"
    # A connection that ends with no answer may have been idle too long: libcurl tries a new one.
    assert source.tally.failed == failed or (trouble == "reset" and source.tally.failed < failed)
    assert (source.tally.throttled > 0) == (trouble in ("503", "429"))


def test_a_fifth_of_all_requests_failing_costs_nothing_but_time(bad_server: BadServer) -> None:
    draw = random.Random(0)
    source = source_of(bad_server, 200)
    bad_server.plan = lambda key, turn, head: (
        draw.choice(["503", "cut"]) if draw.random() < 0.2 else None
    )
    assert source.read(range(200)) == expected(bad_server, 200)


def test_a_server_that_is_away_for_a_while(bad_server: BadServer) -> None:
    source = source_of(bad_server)
    source.read([0])
    bad_server.stop()
    threading.Timer(2.0, bad_server.start).start()
    assert source.read(range(20)) == expected(bad_server)


def test_a_stalled_answer_is_asked_for_again(bad_server: BadServer) -> None:
    source = source_of(bad_server, options={"read_timeout": "300ms"})
    bad_server.plan = lambda key, turn, head: 5.0 if turn == 0 and key == "003" else None
    begin = time.monotonic()
    assert source.read(range(20)) == expected(bad_server)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("500", SourceUnavailable, r"003 could not be read \(\d+ attempts in \d\.\d s\).*500"),
        ("429", SourceUnavailable, "429 Too Many Requests"),
        ("reset", SourceUnavailable, "error sending request"),
        ("cut", SampleCorrupt, "did not arrive whole"),
        ("other", SampleCorrupt, "replaced by another version"),
        ("404", SampleNotFound, "003 is not there"),
    ],
)
def test_what_does_not_pass_is_an_error_of_that_sample(
    bad_server: BadServer, trouble: str, kind: type[Exception], message: str
) -> None:
    source = source_of(bad_server, retry=IMPATIENT)
    bad_server.plan = lambda key, turn, head: trouble if key == "003" else None
    samples, errors = source.read_each([1, 3, 5])
    assert samples == [bad_server.body("001"), None, bad_server.body("005")]
    with pytest.raises(kind, match=message) as raised:
        raise errors[1]
    assert errors[1].ids == [3]
    assert f"{bad_server.url}/003" in str(raised.value)


def test_attempts_are_limited_too(bad_server: BadServer) -> None:
    source = source_of(bad_server, retry=Retry(attempts=3, first=0.001))
    bad_server.plan = lambda key, turn, head: "500"
    with pytest.raises(SourceUnavailable, match="3 attempts"):
        source.read([0])
    assert bad_server.asked["000"] == 3


def test_an_outage_costs_the_deadline_once(bad_server: BadServer) -> None:
    source = source_of(bad_server, 64, retry=Retry(deadline=1.0, first=0.05), concurrency=4)
    bad_server.plan = lambda key, turn, head: "500"
    begin = time.monotonic()
    _, errors = source.read_each(range(64))
    assert len(errors) == 64
    assert time.monotonic() - begin < 6


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stoker"]


def test_newcomer_1_an_address_where_nothing_answers_is_given_up_soon(
    bad_server: BadServer, caplog: pytest.LogCaptureFixture
) -> None:
    bad_server.stop()
    begin = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"Connection refused; check the address"):
        source_of(bad_server, retry=Retry(deadline=600.0, unanswered=0.3))
    assert time.monotonic() - begin < 60
    (line,) = warnings_of(caplog)
    assert line.startswith(f"{bad_server.url} cannot be read: ")
    assert re.search(r"Connection refused; trying again until \d\d:\d\d:\d\d, for 0 s", line)


@pytest.mark.parametrize("known", ["here", "by a parent"])
def test_newcomer_1_an_address_that_answered_before_is_waited_for(
    bad_server: BadServer, known: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(bad_server, retry=Retry(deadline=60.0, unanswered=0.0, first=0.01))
    if known == "by a parent":
        # As a worker has it: with a helper of its own, which has asked for nothing yet.
        source = passed_on(source)
    bad_server.stop()
    reader = threading.Thread(target=lambda: read.extend(source.read(range(20))))
    read: list[bytes] = []
    reader.start()
    until(lambda: bool(warnings_of(caplog)))
    bad_server.start()
    reader.join()
    assert read == expected(bad_server)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("process", ["this", "another"])
def test_newcomer_1_an_outage_has_one_deadline_for_all_calls(
    bad_server: BadServer, process: str
) -> None:
    source = source_of(bad_server, retry=Retry(deadline=3.0, unanswered=0.1))
    other = passed_on(source) if process == "another" else source
    bad_server.stop()
    assert given_up_after(source) >= 2.9
    assert given_up_after(other) < 2.0
    bad_server.start()
    assert other.read(range(20)) == expected(bad_server)
    assert source.read(range(20)) == expected(bad_server)


def test_newcomer_1_what_passes_soon_is_not_reported(
    bad_server: BadServer, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(bad_server)
    bad_server.plan = lambda key, turn, head: "503" if turn < 1 else None
    assert source.read(range(20)) == expected(bad_server)
    assert warnings_of(caplog) == []


def test_newcomer_1_a_request_that_keeps_failing_is_reported(
    bad_server: BadServer, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(bad_server, retry=Retry(deadline=600.0, first=0.01, longest=0.2))
    bad_server.plan = lambda key, turn, head: None if warnings_of(caplog) else "500"
    assert source.read(range(20)) == expected(bad_server)
    (line,) = warnings_of(caplog)
    assert "500 Internal Server Error" in line


def given_up_after(source: ObjectSource) -> float:
    """Return for how many seconds a read was tried, without the start of a helper process."""
    with pytest.raises(SourceUnavailable) as raised:
        source.read([0])
    told = re.search(r"attempts in (\d+\.\d) s", str(raised.value))
    assert told is not None
    return float(told[1])


@pytest.mark.parametrize("status", ["403", "401"])
def test_refused_credentials_are_a_matter_of_configuration(
    bad_server: BadServer, status: str
) -> None:
    source = source_of(bad_server)
    bad_server.plan = lambda key, turn, head: status
    with pytest.raises(ConfigError, match=r"refuses to give .*/000, also after asking"):
        source.read([0])
    assert bad_server.asked["000"] == 3, "by a first attempt, and with old and new credentials"


def test_missing_credentials_are_a_matter_of_configuration(
    bad_server: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    bad_server.stop()
    options = {"allow_http": True, "metadata_endpoint": bad_server.url, "endpoint": bad_server.url}
    with pytest.raises(ConfigError, match="there are no credentials for s3://bucket/x/"):
        ObjectSource("s3://bucket/x", storage_options=options, pace=Pace(retry=QUICK))


class Credentials:
    """Provides a key that gets newer each time it is asked for."""

    asked = 0

    def __call__(self) -> dict[str, Any]:
        type(self).asked += 1
        return {"access_key_id": f"key{self.asked}", "secret_access_key": "s", "expires_at": None}


@pytest.mark.parametrize("provider", [Credentials, Credentials()])
def test_expired_credentials_are_asked_for_anew(bad_server: BadServer, provider: Any) -> None:
    keys = [f"{index:03d}" for index in range(16)]
    source = ObjectSource(
        "s3://bucket",
        keys,
        storage_options={
            "endpoint": bad_server.url,
            "region": "r",
            "allow_http": True,
            "virtual_hosted_style_request": False,
            "credential_provider": provider,
        },
        pace=Pace(retry=QUICK, concurrency=8),
        listing_max_age=0,
    )
    bad_server.plan = lambda key, turn, head: "403" if "key1/" in head else None
    assert source.read(range(16)) == [bad_server.body(f"bucket/{key}") for key in keys]
    assert source.tally.failed <= 8


def test_a_late_answer_is_overtaken_by_a_second_request(bad_server: BadServer) -> None:
    source = source_of(bad_server, 300, hedge=0.95)
    source.read(range(200))
    bad_server.plan = lambda key, turn, head: 1.5 if turn == 0 and key == "250" else None
    begin = time.monotonic()
    assert source.read(range(250, 260)) == expected(bad_server, 300)[250:260]
    assert time.monotonic() - begin < 1.2
    assert source.tally.hedged >= 1


def test_one_rate_limit_for_the_node(bad_server: BadServer) -> None:
    first = source_of(bad_server, 40, requests_per_second=100)
    second = source_of(bad_server, 40, requests_per_second=100)
    first.read([0])
    second.read([0])
    begin = time.monotonic()
    threads = [threading.Thread(target=each.read, args=(range(40),)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.6 < time.monotonic() - begin < 5
