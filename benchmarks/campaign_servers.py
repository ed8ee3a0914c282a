"""The servers of a campaign: a pool, an HTTP server, and the wires to both."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_HERE = Path(__file__).parent
_PATIENCE = 20.0
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server on a port of this machine that can be killed and started again."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.kill()
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise TimeoutError(f"{self._command[0]} did not answer on port {self.port}")

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def pool_server() -> Server | None:
    """Start Valkey or Redis; None if there is neither."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        return None
    port = free_port()
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    policy = ["--maxmemory", "16mb", "--maxmemory-policy", "volatile-ttl"]
    return Server([program, *options, *policy], port)


def http_server(folder: Path, data: Path) -> Server | None:
    """Start nginx for the files in ``data``; None if it is not here."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        return None
    port = free_port()
    folder.mkdir()
    text = f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/log crit;
        events {{ worker_connections 512; }}
        http {{
            access_log off; default_type application/octet-stream;
            client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{ listen 127.0.0.1:{port}; root {data}; autoindex on; }}
        }}"""
    (folder / "conf").write_text(text)
    return Server([program, "-c", str(folder / "conf")], port)


class Wires:
    """Proxies before servers; ``control`` says what each does."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.ports = [free_port() for _ in ports]
        path = folder / "wires"
        path.write_bytes(bytes(8 * max(1, len(ports))))
        with path.open("r+b") as file:
            self.control = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        routes = [f"{near}:{far}" for near, far in zip(self.ports, ports, strict=True)]
        command = [sys.executable, str(_HERE / "campaign_wire.py"), str(path), *routes]
        self._server = Server(command, self.ports[0]) if ports else None

    def close(self) -> None:
        """End the proxies."""
        if self._server is not None:
            self._server.kill()
