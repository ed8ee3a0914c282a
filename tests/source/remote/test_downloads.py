"""Many objects in one thread: each comes back once, whole and of the listed version, or as None."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bad_server import BadServer
from support.s3 import Bucket
from support.servers import free_port

from stoker.errors import ConfigError
from stoker.source.packed import Buffer
from stoker.source.remote import downloads as module
from stoker.source.remote.backend import UNKNOWN_TAG, Direct, Fault, Why, tag_of
from stoker.source.remote.downloads import Downloads, Request
from stoker.store.arena import Arena
from stoker.store.memory_tier import MemoryTier

pytest.importorskip("pycurl")


class Told:
    """What was counted."""

    def __init__(self) -> None:
        self.requests = self.failed = self.received = 0

    def __call__(self, requests: int, failed: int, received: int) -> None:
        self.requests += requests
        self.failed += failed
        self.received += received


def over(url: str, told: Told | None = None, **how: object) -> Downloads:
    def addresses(keys: Sequence[str]) -> list[str]:
        return [f"{url}/{key}" for key in keys]

    return Downloads(Direct(addresses, **how), told or Told())  # type: ignore[arg-type]


def requests_of(server: BadServer, number: int, tag: int = UNKNOWN_TAG) -> list[Request]:
    return [Request(str(index), server.length, tag, index) for index in range(number)]


def all_of(
    downloads: Downloads, requests: Sequence[Request], ways: int = 8
) -> dict[int, Buffer | None]:
    """Get everything, so many at once; each ticket comes back once."""
    left, answers = list(requests), dict[int, Buffer | None]()
    deadline = time.monotonic() + 60
    while len(answers) < len(requests):
        begin = left[: ways - downloads.under_way]
        del left[: len(begin)]
        downloads.start(begin)
        for ticket, data in downloads.wait(1.0):
            assert ticket not in answers
            answers[ticket] = data
        assert time.monotonic() < deadline
    assert downloads.under_way == 0
    assert downloads.wait(0.0) == []
    return answers


def test_what_is_asked_for_comes(bad_server: BadServer) -> None:
    bad_server.length = 100_000
    told = Told()
    downloads = over(bad_server.url, told)
    answers = all_of(downloads, requests_of(bad_server, 100))
    downloads.close()
    assert {index: bad_server.body(str(index)) for index in range(100)} == answers
    assert (told.requests, told.failed, told.received) == (100, 0, 100 * 100_000)


def test_more_descriptors_are_open_than_select_takes(bad_server: BadServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    others = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while others[-1] <= 1024:
            others.append(os.dup(others[0]))
        downloads = over(bad_server.url)
        answers = all_of(downloads, requests_of(bad_server, 10))
        downloads.close()
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {index: bad_server.body(str(index)) for index in range(10)} == answers


@given(
    st.lists(
        st.sampled_from(("good", "503", "500", "404", "403", "cut", "reset", "other", 0.01)),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_goes_wrong_is_left_to_others(
    bad_server: BadServer, script: list[str | float]
) -> None:
    def plan(key: str, turn: int, head: str) -> str | float | None:
        what = script[int(key)]
        return None if what == "good" else what

    bad_server.plan = plan
    told = Told()
    downloads = over(bad_server.url, told)
    answers = all_of(downloads, requests_of(bad_server, len(script), tag_of('"v1"')))
    downloads.close()
    for index, what in enumerate(script):
        if what in ("good", 0.01):
            assert answers[index] in (bad_server.body(str(index)), None)
        else:
            assert answers[index] is None
    if len([what for what in script if what not in ("good", 0.01)]) < module._DISTRUST:
        assert all(
            answers[i] is not None for i, what in enumerate(script) if what in ("good", 0.01)
        )
    assert told.failed <= told.requests <= len(script)


def test_objects_come_into_their_rooms(bad_server: BadServer) -> None:
    bad_server.length = 10_000
    bad_server.plan = lambda key, turn, head: {"3": "503", "5": "cut", "7": "reset"}.get(key)
    ids, sizes = np.arange(12, dtype=np.uint32), np.full(12, 10_000)
    with Arena(12, 100_000, 10_000) as arena:
        arena.claim(ids)
        rooms = MemoryTier(arena).reserve(ids, sizes)
        assert rooms is not None
        assert rooms.reserved().tolist() == [True] * 10 + [False] * 2
        downloads = over(bad_server.url)
        asked = [
            each._replace(room=(rooms, index))
            for index, each in enumerate(requests_of(bad_server, 12))
        ]
        answers = all_of(downloads, asked)
        downloads.close()
        # What has no room comes as an object.
        assert [answers[index] for index in (10, 11)] == [bad_server.body(str(i)) for i in (10, 11)]
        came = [answers[index] is not None for index in range(12)]
        assert not any(came[index] for index in (3, 5, 7))
        assert all(answers[index] == b"" for index in range(10) if came[index])
        there = rooms.settle(np.array(came))
        assert there.tolist() == came[:10] + [False] * 2
        for index in range(12):
            expected = bad_server.body(str(index)) if there[index] else None
            assert arena.get(index) == expected
        arena.verify()


def test_a_room_of_another_size_is_refused(bad_server: BadServer) -> None:
    with Arena(1, 100_000, 10_000) as arena:
        rooms = arena.reserve([0], np.array([999]))
        downloads = over(bad_server.url)
        for room in ((rooms, 0), (rooms, 1)):
            with pytest.raises(ConfigError, match="no such room"):
                downloads.start([Request("0", 1000, UNKNOWN_TAG, 0, room)])
        downloads.close()


@pytest.mark.parametrize("listed", [999, 1001])
def test_an_object_of_another_size_is_not_taken(bad_server: BadServer, listed: int) -> None:
    downloads = over(bad_server.url)
    assert all_of(downloads, [Request("0", listed, UNKNOWN_TAG, 0)]) == {0: None}
    downloads.close()


def test_after_failures_in_a_row_nothing_is_asked_for_a_while(
    bad_server: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_server.plan = lambda key, turn, head: "503"
    downloads = over(bad_server.url)
    all_of(downloads, requests_of(bad_server, module._DISTRUST), ways=1)
    asked = bad_server.asked.total()
    bad_server.plan = lambda key, turn, head: None
    assert set(all_of(downloads, requests_of(bad_server, 20)).values()) == {None}
    assert bad_server.asked.total() == asked
    downloads._pause_until = time.monotonic()  # half a minute later
    assert None not in all_of(downloads, requests_of(bad_server, 20)).values()
    downloads.close()


def test_a_server_that_is_not_there_and_keys_without_address() -> None:
    downloads = over(f"http://127.0.0.1:{free_port()}")
    assert all_of(downloads, [Request("a", 1, 0, 0), Request("b", 1, 0, 1)]) == {0: None, 1: None}
    downloads.close()

    def unknown(keys: Sequence[str]) -> list[str]:
        raise Fault(Why.NO_CREDENTIALS, "none")

    downloads = Downloads(Direct(unknown), Told())
    assert all_of(downloads, [Request("a", 1, 0, 0), Request("b", 1, 0, 1)]) == {0: None, 1: None}
    downloads.close()


def test_a_wait_ends_when_it_is_called(bad_server: BadServer) -> None:
    answering = threading.Event()
    bad_server.plan = lambda key, turn, head: 0.0 if answering.wait(30) else None
    downloads = over(bad_server.url)
    downloads.start(requests_of(bad_server, 1))
    calls = threading.Timer(0.05, downloads.wake)
    calls.start()
    while calls.is_alive():
        assert downloads.wait(30.0) == []
    answering.set()
    while not (answers := downloads.wait(30.0)):
        pass
    assert answers == [(0, bad_server.body("0"))]
    downloads.close()


def test_a_stalled_server_is_given_up(bad_server: BadServer) -> None:
    bad_server.plan = lambda key, turn, head: 30.0
    downloads = over(bad_server.url, total_seconds=0.1)
    assert all_of(downloads, requests_of(bad_server, 1)) == {0: None}
    downloads.close()


def test_without_a_libcurl_to_share_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import pycurl

    from stoker import _core

    monkeypatch.setattr(pycurl, "_pycurl", _core, raising=False)  # which has none
    with pytest.raises(ImportError, match="curl_easy_init"):
        over("http://127.0.0.1:1")


def test_for_plain_http_no_certificates_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(module, "_authorities", lambda: looked.append("once") or "")
    over("http://127.0.0.1:1", is_encrypted=False).close()
    assert not looked
    over("https://127.0.0.1:1").close()
    assert looked == ["once"]


def test_headers_are_sent(bad_server: BadServer) -> None:
    heads: list[str] = []
    bad_server.plan = lambda key, turn, head: heads.append(head)
    downloads = over(bad_server.url, headers={"X-Token": "secret"})
    all_of(downloads, requests_of(bad_server, 1))
    downloads.close()
    assert "x-token: secret" in heads[0].lower()


READING = """
import json, sys
import numpy as np
from stoker.source.objects import ObjectSource
from stoker.source.remote.client import serve_clients_here

serve_clients_here()
url, keys, options = json.loads(sys.argv[1])
source = ObjectSource(url, keys, storage_options=options)
def read(multiplexer):
    got = {}
    multiplexer.start([(sample, sample) for sample in range(len(source))], [None] * len(source))
    while len(got) < len(source):
        got |= dict(multiplexer.wait(10.0))
    return got
multiplexer = source.multiplexer()
before = source.tally.requests
got = read(multiplexer)
print(json.dumps({
    "same": [got[i] == source.read([i])[0] for i in range(len(source))],
    "tags": int(np.count_nonzero(source._tags.array)),
    "counted": source.tally.requests - before - len(source),
}), flush=True)
input()
print(json.dumps([got is None for _, got in sorted(read(multiplexer).items())]), flush=True)
"""


def reading(
    url: str, keys: Sequence[str] | None, options: dict[str, object]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READING, json.dumps([url, keys, options])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


NAMES = ("a.bin", "sub folder/b+c&d%41.bin", "ä/ö.bin")


def test_signed_addresses_of_s3_give_what_its_client_gives(bucket: Bucket) -> None:
    bucket.put({name: name.encode() * 1000 for name in NAMES})
    with reading(bucket.url, None, bucket.options()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == {"same": [True] * 3, "tags": 3, "counted": 3}
        bucket.put({"a.bin": b"other" * 1000})
        child.stdin.write("\n")
        child.stdin.flush()
        # One that was replaced by one of the same size is for the client to report.
        assert json.loads(child.stdout.readline()) == [True, False, False]


def test_a_web_server_gives_what_its_client_gives(web: tuple[str, Path]) -> None:
    url, served = web
    for name in NAMES:
        (served / name).parent.mkdir(exist_ok=True)
        (served / name).write_bytes(name.encode() * 1000)
    with reading(url, NAMES, {"allow_http": True}) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == {"same": [True] * 3, "tags": 3, "counted": 3}
        (served / NAMES[0]).unlink()
        child.stdin.write("\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == [True, False, False]


@pytest.mark.parametrize(
    ("root", "options", "is_direct"),
    [
        ("https://host", {}, True),
        ("http://host", {"allow_http": True}, True),
        ("https://host", {"timeout": "90 s", "default_headers": {"a": "b"}}, True),
        ("https://host", {"client_options": {"proxy_url": "http://proxy"}}, False),
        ("https://host", {"timeout": "1 fortnight"}, False),
        ("s3://bucket", {"region": "eu-central-1", "AWS_ACCESS_KEY_ID": "a"}, True),
        ("s3://bucket", {"region": "eu-central-1", "sse_customer_key_base64": "a"}, False),
        ("s3://bucket", {"region": "eu-central-1", "default_headers": {"a": "b"}}, False),
        ("gs://bucket", {}, False),
        ("file://", {}, False),
    ],
)
def test_only_what_any_client_gets_is_read_directly(
    root: str, options: dict[str, object], is_direct: bool
) -> None:
    from stoker.source.remote.obstore_backend import ObstoreBackend

    pytest.importorskip("obstore")
    backend = object.__new__(ObstoreBackend)
    backend._root, backend._options = root, pickle.dumps(options)
    direct = backend.direct()
    assert (direct is not None) == is_direct
    assert direct is None or direct.is_encrypted == (root != "http://host")
