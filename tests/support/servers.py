"""Servers that tests start: any program, and an S3 stand-in with its fixtures."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.s3 import Bucket
from support.waiting import await_true


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until something listens on ``port``."""
    if not await_true(lambda: process.poll() is not None or listens(port)) or process.poll():
        raise RuntimeError(f"{process.args!r} does not listen: exit status {process.poll()}")


def listens(port: int) -> bool:
    """Whether something listens on ``port``."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def refuses(url: str, status: str) -> None:
    """See that a GET is answered with this error."""
    with pytest.raises(urllib.error.HTTPError, match=status) as refused:
        urllib.request.urlopen(url, timeout=60)
    refused.value.close()


def serve(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """Run a server while the generator is suspended."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an S3 stand-in."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    for _ in serve(command, port, tmp_path_factory.mktemp("moto")):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def bucket(moto: str) -> Iterator[Bucket]:
    """An empty bucket."""
    bucket = Bucket(moto)
    yield bucket
    bucket.close()
