import contextlib
import dataclasses
import gc
import json
import os
import select
import socket
import threading
import time

import numpy as np
import pytest
from support.waiting import await_true

from stoker.node import descriptors, messages, rendezvous
from stoker.node.rendezvous import Announcement

SAID = Announcement("key", "token", "/data", 1000, [{"name": "main"}], {"abi": 1}, {}, "arena")


def await_client(listener):
    assert select.select([listener], [], [], 10)[0]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_other_tests():
    gc.collect()  # nor closes its files later


@pytest.fixture
def served(tmp_path):
    """A path, and a function that makes the next connection there get an answer."""
    path = tmp_path / ("deep" * 30) / "a.sock"  # longer than a socket's address may be
    path.parent.mkdir()
    listener = messages.listen(path)

    def answer(answerer):
        def run():
            await_client(listener)
            with contextlib.suppress(ConnectionError):
                answerer(listener)

        thread = threading.Thread(target=run)
        thread.start()
        threads.append(thread)
        return path

    threads = []
    yield answer
    for thread in threads:
        thread.join()
    descriptors.drop(listener)


def say(line, fds=()):
    def answer(listener):
        connection = listener.accept()[0]
        with connection:
            if line:
                socket.send_fds(connection, [line], fds)

    return answer


def proper(**changes):
    return json.dumps({"stoker": 2, **dataclasses.asdict(SAID), **changes}).encode() + b"\n"


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_descriptors_and_values_arrive(served, tmp_path):
    (tmp_path / "file").write_text("hello")
    with open(tmp_path / "file") as file:  # noqa: PTH123
        said = dataclasses.replace(SAID, stats={"hits": np.int64(3), "odd": {1}})
        path = served(lambda listener: rendezvous.answer(listener, said, [file.fileno()]))
        got, fds, pid = rendezvous.inquire(path)
    assert dataclasses.replace(got, stats={}) == SAID
    assert got.stats == {"hits": 3, "odd": "{1}"}
    assert pid == os.getpid()
    assert [os.read(fd.fileno(), 9) for fd in fds] == [b"hello"]
    assert not any(os.get_inheritable(fd.fileno()) for fd in fds)
    for fd in fds:
        descriptors.drop(fd)


def test_an_answer_may_come_in_pieces(served):
    def answer(listener):
        connection = listener.accept()[0]
        with connection:
            for at in range(0, len(proper()), 40):
                connection.sendall(proper()[at : at + 40])
                time.sleep(0.002)

    assert rendezvous.inquire(served(answer))[0] == SAID


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"\xff\xfe garbage\n",
        b"[1, 2]\n",
        b"7\n",
        b'{"stoker": 2}\n',
        proper()[:-1],
        proper(stoker=1),
        proper(extra=1),
        proper(token=5),
        proper(meta=None),
        b"x" * 200_000,
    ],
)
def test_a_strange_answer_is_an_error_and_leaks_nothing(served, line):
    before = open_fds()
    with open("/dev/null") as file:  # noqa: PTH123
        path = served(say(line, [file.fileno()]))
        with pytest.raises(OSError):
            rendezvous.inquire(path)
    # Threads of other tests may still be closing theirs, or have one open for a moment.
    assert await_true(lambda: len(open_fds()) <= len(before), 5), (open_fds(), before)


def test_a_silent_server_is_given_up_in_time(served):
    gave_up = threading.Event()

    def answer(listener):
        with listener.accept()[0]:
            gave_up.wait(60)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        rendezvous.inquire(served(answer), timeout=0.1)
    assert time.monotonic() - begin < 5
    gave_up.set()


def test_nobody_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        rendezvous.inquire(tmp_path / "a.sock")
    descriptors.drop(messages.listen(tmp_path / "a.sock"))
    with pytest.raises(ConnectionRefusedError):
        rendezvous.inquire(tmp_path / "a.sock")


@pytest.mark.parametrize("side", ["server", "client"])
def test_strangers_are_turned_away(served, monkeypatch, side):
    stranger = messages.Peer(1, os.geteuid() + 1, 0)
    monkeypatch.setattr(messages, "peer", lambda connection: stranger)
    if side == "server":
        with pytest.raises(PermissionError, match="is served by user"):
            rendezvous.inquire(served(say(proper())))
    else:
        path = served(lambda listener: rendezvous.answer(listener, SAID, []))
        with socket.socket(socket.AF_UNIX) as client, messages.SocketAddress(path) as address:
            client.connect(address)
            assert client.recv(10) == b"", "the answer would hand out the arena"


def test_who_goes_away_at_once_is_no_trouble(served, tmp_path):
    done = threading.Event()

    def answer(listener):
        for _ in range(20):
            await_client(listener)
            rendezvous.answer(listener, SAID, [])
        done.set()

    path = served(answer)
    for _ in range(20):
        client = socket.socket(socket.AF_UNIX)
        with client, messages.SocketAddress(path) as address:
            client.connect(address)
            with contextlib.suppress(BrokenPipeError):  # it may have answered and hung up already
                client.send(os.urandom(100))
    assert done.wait(60)
