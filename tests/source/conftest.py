"""Servers for the sources of objects: a real S3 stand-in, real web servers, and a bad one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bad_server import BadServer
from support.processes import start_warm
from support.servers import free_port, serve

from stoker.source.remote import helper


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own for the listings of each test."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def begin_helpers_warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin helper processes where their imports are done: these tests start hundreds of them.

    Tests of helpers themselves, in ``remote``, start them as Stoker does.
    """
    if request.path.parent.name != "remote":
        monkeypatch.setattr(helper, "child", SimpleNamespace(start=start_warm))


@pytest.fixture(scope="session", params=["http.server", "nginx"])
def web(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A web server: its address, and the folder that it serves."""
    folder, port = tmp_path_factory.mktemp("web"), free_port()
    served = folder / "served"
    served.mkdir()
    if request.param == "nginx":
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if nginx is None:
            pytest.skip("nginx is not installed: apt-get install nginx")
        config = folder / "nginx.conf"
        # Started by root it would serve as a user who may not enter pytest's directories.
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(
            f"{user} daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
            "events {}\n"
            f"http {{ access_log off; client_body_temp_path {folder}/a; "
            f"proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; "
            f"uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;\n"
            f"server {{ listen 127.0.0.1:{port}; root {served}; }} }}\n"
        )
        command = [nginx, "-c", str(config), "-p", str(folder)]
    else:
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
        command += ["--directory", str(served), str(port)]
    for _ in serve(command, port, folder):
        yield f"http://127.0.0.1:{port}", served


@pytest.fixture
def bad_server() -> Iterator[BadServer]:
    """A server that misbehaves as told."""
    with BadServer() as server:
        yield server
