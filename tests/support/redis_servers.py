"""Real Valkey or Redis servers for tests: alone, as a cluster, with passwords, with TLS."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from stoker.pool import credentials
from support.servers import listens
from support.waiting import until

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")

needs_server = pytest.mark.skipif(
    SERVER is None or CLI is None, reason="neither valkey-server nor redis-server is on PATH"
)


def free_port() -> int:
    """Return a port where nobody listens, nor ten thousand above it, where a cluster's bus is."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10000))
                return int(port)


class Server:
    """One server process on the loopback, without persistence; ``options`` as in its file."""

    def __init__(self, *options: str, port: int | None = None, tls: str = "") -> None:
        assert SERVER is not None
        self.port = port or free_port()
        self.name = f"127.0.0.1:{self.port}"
        self._folder = tempfile.mkdtemp(prefix="stoker-test-")
        self._options = options
        self._tls = tls
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start it, again after :meth:`kill`, with nothing in it."""
        assert SERVER is not None
        listening = ["--tls-port", "--port", "0"] if self._tls else ["--port"]
        self._process = subprocess.Popen(
            [
                *(SERVER, listening[0], str(self.port), *listening[1:], "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", self._folder, *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: listens(self.port))

    def kill(self) -> None:
        """Kill it without warning."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop it, as a debugger would; connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def client(self, **options):
        """Return a client of redis-py's own."""
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    def close(self) -> None:
        """End it, and remove what it left."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def make_cluster(primaries: int, replicas: int = 0, secured: Path | None = None) -> list[Server]:
    """Return servers that are one cluster, which fails over within a second or two.

    ``secured``: an empty folder for certificates; they then use TLS, and want the password "pw".
    """
    assert CLI is not None
    options, client, told = [], {}, []
    if secured is not None:
        options = [*make_certificates(secured), "--tls-cluster", "yes", "--requirepass", "pw"]
        client = {"password": "pw", "ssl": True, "ssl_ca_certs": str(secured / "ca.crt")}
        told = ["--tls", "--cacert", str(secured / "ca.crt"), "-a", "pw"]
    fast = ["--cluster-enabled", "yes", "--cluster-node-timeout", "500"]
    servers = [
        Server(*fast, *options, tls="yes" if secured else "")
        for _ in range(primaries * (1 + replicas))
    ]
    try:
        done = subprocess.run(
            [
                *(CLI, *told, "--cluster", "create", *[server.name for server in servers]),
                *("--cluster-replicas", str(replicas), "--cluster-yes"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for server in servers:
            _await_cluster(server, client)
    except BaseException:
        for server in servers:
            server.close()
        raise
    return servers


def _await_cluster(server: Server, options: dict[str, object]) -> None:
    with contextlib.closing(server.client(**options)) as client:
        until(lambda: client.cluster("info")["cluster_state"] == "ok")


def make_certificates(folder: Path) -> list[str]:
    """Make a CA, and a certificate for 127.0.0.1; return the server's options for TLS."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    credentials.provide_certificates(folder, "127.0.0.1")
    return [
        *("--tls-cert-file", str(folder / credentials.SERVER), "--tls-key-file"),
        *(str(folder / credentials.SERVER_KEY), "--tls-ca-cert-file", str(folder / "ca.crt")),
        *("--tls-auth-clients", "no"),
    ]
