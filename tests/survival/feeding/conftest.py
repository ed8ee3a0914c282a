"""A place of each test's own, a watchdog, and a look at what it left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bad_server import BadServer

from .processes import nothing_left
from .s3_server import S3Server
from .samples import sample

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60 + item.config.getoption("--soak")))


@pytest.fixture(autouse=True)
def own_places(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    # Short, because the path of a Unix socket has at most 107 bytes.
    base = tmp_path_factory.mktemp("f")
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(base / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    with nothing_left():
        yield


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 stand-in that tests may stop, if they start it again."""
    pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    server = S3Server(tmp_path_factory.mktemp("moto"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


class BadStorage(BadServer):
    """Serves the samples by their numbers, and misbehaves as told."""

    def body(self, key: str) -> bytes:
        return sample(int(key))

    def _answer(self, connection: socket.socket, head: str) -> bool:
        goes_on = super()._answer(connection, head)
        if not goes_on:
            # Workers forked from here hold copies: closing ours alone would not end it.
            connection.shutdown(socket.SHUT_RDWR)
        return goes_on


@pytest.fixture
def bad_storage() -> Iterator[BadStorage]:
    """Samples behind a server that misbehaves as told."""
    with BadStorage() as server:
        yield server
