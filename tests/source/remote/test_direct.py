"""Objects of web servers that the process which wants them gets itself, and what it leaves."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bad_server import BadServer

from stoker.errors import SampleNotFound, SourceUnavailable
from stoker.source import ObjectSource, Pace, Retry
from stoker.source.remote.backend import Entry, address_of, tag_of
from stoker.source.remote.client import Client
from stoker.source.remote.direct import DirectReads
from stoker.source.remote.request import Wanted

pytest.importorskip("pycurl")
pytest.importorskip("obstore")

_HTTP = {"allow_http": True}


@pytest.fixture
def client(bad_server: BadServer) -> Iterator[Client]:
    location = address_of(bad_server.url, _HTTP).location
    client = Client(location, Pace(retry=Retry(deadline=0.5, first=0.01)))
    yield client
    client.close()


def wanted(server: BadServer, keys: list[str], starts: list[int] | None = None) -> Wanted:
    count = len(keys)
    lengths = np.full(count, server.length)
    if starts is not None:
        lengths[np.array(starts) >= 0] = 10
    return Wanted(
        keys,
        np.full(count, -1) if starts is None else np.array(starts),
        lengths,
        np.full(count, server.length),
        np.full(count, tag_of('"v1"'), np.uint64),
    )


def has_helper(client: Client) -> bool:
    return client._link is not None


def test_objects_come_without_a_helper(bad_server: BadServer, client: Client) -> None:
    keys = [str(index) for index in range(100)]
    data, failures = client.fetch(wanted(bad_server, keys))
    assert not failures
    assert data.tobytes() == b"".join(map(bad_server.body, keys))
    assert not has_helper(client)
    assert (client.tally.requests, client.tally.failed) == (100, 0)
    assert client.tally.received_bytes == len(data)


def test_what_the_storage_says_is_what_its_client_is_told(
    bad_server: BadServer, client: Client
) -> None:
    keys = ["1", "two", "3 of them"]
    entries = client.head(keys)
    assert not has_helper(client)
    hedging = Client(address_of(bad_server.url, _HTTP).location, Pace(hedge=0.99))
    try:
        assert entries == hedging.head(keys)
        assert has_helper(hedging), "what sends second requests needs one"
    finally:
        hedging.close()
    assert entries[0] == Entry(b"1", bad_server.length, tag_of('"v1"'))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("good", "503", "404", "cut", "reset", "other")),
            st.sampled_from((-1, -1, 0, 50)),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_does_not_come_at_once_is_left_to_the_helper(
    bad_server: BadServer, script: list[tuple[str, int, bool]]
) -> None:
    """Each piece ends as the storage has it, or as a failure of its own."""
    turns = [0] * len(script)

    def plan(key: str, turn: int, head: str) -> str | None:
        what, _, is_lasting = script[int(key)]
        turns[int(key)] += 1
        return what if what != "good" and (is_lasting or turns[int(key)] == 1) else None

    bad_server.plan = plan
    client = Client(
        address_of(bad_server.url, _HTTP).location, Pace(retry=Retry(deadline=0.05, first=0.01))
    )
    asked = wanted(
        bad_server, [str(index) for index in range(len(script))], [start for _, start, _ in script]
    )
    try:
        data, failures = client.fetch(asked)
    finally:
        client.close()
    ends = np.cumsum(asked.lengths)
    for index, (what, start, is_lasting) in enumerate(script):
        piece = data[ends[index] - asked.lengths[index] : ends[index]].tobytes()
        is_bad = what != "good" and is_lasting
        if is_bad and start < 0:
            assert index in failures
        if index not in failures:
            body = bad_server.body(str(index))
            assert piece == (body if start < 0 else body[: len(piece)])
    assert all(script[index][0] != "good" or script[index][1] >= 0 for index in failures)


def test_a_source_of_a_web_server_starts_no_process(bad_server: BadServer) -> None:
    source = ObjectSource(bad_server.url, ["1", "2"], storage_options=_HTTP)
    assert source.is_ready
    assert source.read([1, 0]) == [bad_server.body("2"), bad_server.body("1")]
    assert not has_helper(source._client)
    source.close()


def test_an_object_that_is_not_there_is_told_as_by_the_helper(bad_server: BadServer) -> None:
    bad_server.plan = lambda key, turn, head: "404" if key == "2" else None
    source = ObjectSource(bad_server.url, ["1", "2"], storage_options=_HTTP)
    with pytest.raises(SampleNotFound):
        source.read([0, 1])
    source.close()


def test_a_server_that_is_down_is_an_outage(bad_server: BadServer) -> None:
    pace = Pace(retry=Retry(deadline=0.3, first=0.01))
    source = ObjectSource(bad_server.url, ["1", "2"], storage_options=_HTTP, pace=pace)
    bad_server.stop()
    with pytest.raises(SourceUnavailable):
        source.read([0])
    bad_server.start()
    assert source.read([0]) == [bad_server.body("1")]
    source.close()


def test_it_works_in_forked_children_and_in_its_parent_after(
    bad_server: BadServer, client: Client
) -> None:
    """Neither reads what is meant for the other."""
    asked = wanted(bad_server, [str(index) for index in range(8)])
    expected = client.fetch(asked)[0].tobytes()
    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status = int(client.fetch(asked)[0].tobytes() != expected or has_helper(client))
            finally:
                os._exit(status)
        children.append(pid)
        assert client.fetch(asked)[0].tobytes() == expected
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    assert client.fetch(asked)[0].tobytes() == expected


def test_threads_read_side_by_side(bad_server: BadServer, client: Client) -> None:
    ends = threading.Barrier(4)
    results: list[bytes] = []

    def read() -> None:
        ends.wait()
        results.append(client.fetch(wanted(bad_server, ["1", "2", "3"]))[0].tobytes())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"".join(map(bad_server.body, "123"))] * 4
    assert not has_helper(client)


def test_a_copy_elsewhere_reads_too(bad_server: BadServer, client: Client) -> None:
    asked = wanted(bad_server, ["1"])
    client.fetch(asked)
    copy = pickle.loads(pickle.dumps(client))
    assert copy.fetch(asked)[0].tobytes() == bad_server.body("1")
    assert not has_helper(copy)
    copy.close()


def test_a_limit_is_kept_to_by_a_helper(bad_server: BadServer) -> None:
    limited = Client(
        address_of(bad_server.url, _HTTP).location, Pace(requests_per_second=1000, hedge=None)
    )
    try:
        limited.fetch(wanted(bad_server, ["1"]))
        assert has_helper(limited)
    finally:
        limited.close()


def test_what_was_interrupted_is_not_answered_to_the_next(
    bad_server: BadServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that comes late belongs to a call that is over."""
    direct = client._reads_directly()
    assert isinstance(direct, DirectReads)
    (downloads,) = direct._idle
    bad_server.plan = lambda key, turn, head: 0.2 if key == "slow" else None
    with monkeypatch.context() as patched:
        patched.setattr(downloads, "wait", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.fetch(wanted(bad_server, ["slow"]))
    assert downloads not in direct._idle
    assert client.fetch(wanted(bad_server, ["1"]))[0].tobytes() == bad_server.body("1")
