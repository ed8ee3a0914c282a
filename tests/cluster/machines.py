"""Two machines for tests: network namespaces with one link between them, which can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.redis_servers import SERVER
from support.waiting import until


class Unavailable(Exception):
    """What this machine does not allow; the message says why."""


@dataclass(frozen=True)
class Machine:
    """A namespace with an address of its own, on the device ``eth0``."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` there."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Take its end of the link down."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Bring its end of the link up again."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Raises Unavailable where there is no root or no iproute2, or namespaces are not allowed."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    if shutil.which("ip") is None:
        raise Unavailable("`ip` is not on PATH (Debian: iproute2)")
    mark = f"stoker-test-{os.getpid()}"
    one, other = Machine(f"{mark}-a", "10.83.1.1"), Machine(f"{mark}-b", "10.83.1.2")
    with contextlib.ExitStack() as stack:
        for machine in (one, other):
            _run("ip", "netns", "add", machine.name)
            stack.callback(subprocess.run, ["ip", "netns", "del", machine.name], check=False)
        link = f"link add eth0 type veth peer name eth0 netns {other.name}"
        _run("ip", "-n", one.name, *link.split())
        for machine in (one, other):
            _run("ip", "-n", machine.name, *f"addr add {machine.address}/24 dev eth0".split())
            for device in ("lo", "eth0"):
                _run("ip", "-n", machine.name, "link", "set", device, "up")
        yield one, other


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip()}")


@contextlib.contextmanager
def server_on(machine: Machine) -> Iterator[Any]:
    """A Valkey or Redis server there, on the usual port; gives a client that needs no network."""
    import redis

    assert SERVER is not None
    with tempfile.TemporaryDirectory(prefix="stoker-test-") as folder:
        path = Path(folder) / "server.sock"
        listening = ["--bind", machine.address, "--protected-mode", "no", "--unixsocket", str(path)]
        keeping = ["--save", "", "--appendonly", "no", "--dir", folder, "--maxmemory", "100mb"]
        process = subprocess.Popen(
            machine.command(SERVER, *listening, *keeping, "--maxmemory-policy", "volatile-ttl"),
            stdout=subprocess.DEVNULL,
        )
        try:
            with redis.Redis(unix_socket_path=str(path)) as client:
                _await_answer(client)
                yield client
        finally:
            process.kill()
            process.wait()


def _await_answer(client: Any) -> None:
    import redis

    def answers() -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    until(answers)
