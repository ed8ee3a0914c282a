"""The server of the live page: who may see it, and clients of every bad kind."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.servers import free_port, refuses
from support.waiting import until

from stoker.errors import ConfigError, StokerError
from stoker.jobs import http_server
from stoker.jobs.http_server import WebServer


@contextmanager
def serving(
    where: int | Path = 0, frame: str = "[1]", group: int | None = None
) -> Iterator[WebServer]:
    server = WebServer(where, lambda: frame, group=group)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def address(server: WebServer) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return str(parts.hostname), int(parts.port or 0)


def events(server: WebServer) -> str:
    return server.url.replace("/?", "/events?")


def through(path: Path, request: bytes) -> bytes:
    """All that the socket answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(request)
        return connection.makefile("rb").readline()


@pytest.mark.parametrize("path", ["/", "/events", "/?token=", "/?token=no", "/?token=%ff%00", "/x"])
def test_without_its_token_a_port_shows_nothing(path: str) -> None:
    with serving() as server:
        where, port = address(server)
        refuses(f"http://{where}:{port}{path}", "403")


def test_with_it_the_page_and_its_events_come_and_nothing_else() -> None:
    with serving(frame='{"jobs": []}') as server:
        with urllib.request.urlopen(server.url, timeout=60) as page:
            assert b"<title>Stoker" in page.read()
            policy = page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert page.headers["Referrer-Policy"] == "no-referrer"
        with urllib.request.urlopen(events(server), timeout=60) as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            assert stream.readline() == b'data: {"jobs": []}\n'
        refuses(server.url.replace("/?", "/../etc/passwd?"), "404")


def test_each_service_has_a_token_of_its_own() -> None:
    with serving() as one, serving() as other:
        assert one.url.partition("token=")[2] != other.url.partition("token=")[2]
        assert len(one.url.partition("token=")[2]) >= 40


def test_a_socket_is_for_its_user_and_needs_no_token(tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with serving(path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"200" in through(path, b"GET / HTTP/1.1\r\n\r\n")
    assert not path.exists()


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(30)
    try:
        connection.connect(sys.argv[1])
        connection.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        print(connection.makefile("rb").readline())
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_sees_a_socket_only_as_a_member_of_the_group() -> None:
    def seen(path: Path) -> str:
        command = [sys.executable, "-c", AS_NOBODY, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        with serving(Path(name) / "all.sock", group=65534) as server:
            assert "200" in seen(Path(server.url))
        with serving(Path(name) / "own.sock") as server:
            assert "PermissionError" in seen(Path(server.url))
            Path(server.url).chmod(0o666)  # even then the kernel says who asks
            assert "403" in seen(Path(server.url))


def test_a_path_or_port_that_is_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("thesis")
    with pytest.raises(ConfigError, match="precious"):
        WebServer(tmp_path / "precious", str)
    assert (tmp_path / "precious").read_text() == "thesis"
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"web={port}"):
            WebServer(port, str)


GARBAGE = {
    "bytes": b"\xff\x00\x80" * 100 + b"\r\n\r\n",
    "no request": b"\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a bad version": b"GET / HTTP/9.z\r\n\r\n",
    "a bad URL": b"GET http://[::1/ HTTP/1.1\r\n\r\n",
    "another method": b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "many fields": b"GET /?" + b"a=1&" * 2000 + b" HTTP/1.1\r\n\r\n",
    "headers without end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
    "one long line": b"GET /" + b"x" * 100_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_gets_an_error_or_nothing_and_the_page_is_still_served(kind: str) -> None:
    with serving() as server:
        with socket.create_connection(address(server), timeout=30) as connection:
            answer = b""
            try:
                connection.sendall(GARBAGE[kind])
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except TimeoutError:
                raise
            except OSError:  # it has hung up
                pass
            assert b"200" not in answer.partition(b"\n")[0]
            assert b"Traceback" not in answer
        assert urllib.request.urlopen(server.url, timeout=60).status == 200


def test_a_thousand_silent_clients_keep_nobody_out_and_take_few_threads() -> None:
    with serving() as server, contextlib.ExitStack() as silent:
        before = threading.active_count()
        for _ in range(1000):
            silent.enter_context(socket.create_connection(address(server), timeout=60))
        assert urllib.request.urlopen(server.url, timeout=60).status == 200
        assert threading.active_count() - before <= http_server._MOST + 1


def test_open_pages_are_bounded_and_one_that_closes_makes_room() -> None:
    with serving() as server, contextlib.ExitStack() as pages:
        streams = [
            pages.enter_context(urllib.request.urlopen(events(server), timeout=60))
            for _ in range(http_server._MOST_VIEWERS)
        ]
        assert {stream.readline() for stream in streams} == {b"data: [1]\n"}
        refuses(events(server), "503")
        assert urllib.request.urlopen(server.url, timeout=60).status == 200, "requests have room"
        streams[0].close()

        def has_room() -> bool:
            try:
                pages.enter_context(urllib.request.urlopen(events(server), timeout=60))
            except urllib.error.HTTPError as error:
                error.close()
                return False
            return True

        until(has_room)


def test_a_page_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "EVERY", 0.0)
    monkeypatch.setattr(http_server, "_TO_TAKE", 0.3)
    with serving(frame="x" * 1_000_000) as server:
        connection = http.client.HTTPConnection(*address(server), timeout=60)
        connection.request("GET", events(server))
        until(lambda: server._viewers.total() == 1)
        until(lambda: server._viewers.total() == 0)
        connection.close()


def test_when_the_jobs_cannot_be_looked_at_a_page_is_told_and_stays() -> None:
    def broken() -> str:
        raise StokerError("no")

    server = WebServer(0, broken)
    assert server.event() == b"event: trouble\ndata:\n\n"
    server.close()


def test_it_is_looked_once_for_all_pages() -> None:
    looks: list[int] = []
    server = WebServer(0, lambda: str(looks.append(1)))
    assert {server.event() for _ in range(50)} == {b"data: None\n\n"}
    assert len(looks) < 5
    server.close()
