"""The faults of the campaign, each done to the processes, files and servers of one run."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from campaign_wire import Wire

BALLAST = "ballast"


@dataclass(frozen=True)
class Process:
    """A process of the run."""

    pid: int
    parent: int
    command: str
    role: str
    """rank, worker, prefetch, packager, helper, tiering, reader, launcher, other"""


_ROLES = {
    "stoker.prefetch": "prefetch",
    "stoker.bundles": "packager",
    "stoker.source.remote": "helper",
    "stoker.tiering": "tiering",
    "stoker.cli": "launcher",
    "campaign_reader": "reader",
}
_NOT_OURS = ("resource_tracker", "torch_shm_manager", "campaign_wire", "redis", "valkey", "nginx")


def set_clock(clock: Path, seconds: float) -> None:
    """Move the wall clocks of all processes by ``seconds`` from the true time."""
    with clock.open("r+b") as file:
        file.write(struct.pack("d", seconds))


def processes(ranks: dict[int, int]) -> list[Process]:
    """Return all descendants of this process that belong to the run, but for servers.

    ``ranks``: process id by rank.
    """
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if fields[0] != "Z":
                table[int(folder.name)] = (int(fields[1]), command)
    found = []
    for pid, (parent, command) in table.items():
        if pid == os.getpid() or not _descends(pid, table):
            continue
        if any(name in command for name in _NOT_OURS):
            continue
        found.append(Process(pid, parent, command, _role(pid, parent, command, ranks)))
    return found


def _descends(pid: int, table: dict[int, tuple[int, str]]) -> bool:
    while pid in table:
        pid = table[pid][0]
        if pid == os.getpid():
            return True
    return False


def _role(pid: int, parent: int, command: str, ranks: dict[int, int]) -> str:
    if pid in ranks.values():
        return "rank"
    for name, role in _ROLES.items():
        if name in command:
            return role
    return "worker" if parent in ranks.values() else "other"


class MemoryGroup:
    """A control group that limits the memory of the run's processes; of version 1 or 2."""

    def __init__(self, path: Path, limit: str, usage: str, unlimited: str) -> None:
        self._path, self._limit, self._usage = path, path / limit, path / usage
        self._unlimited = unlimited

    def enter(self) -> None:
        """Put this process into the group."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def squeeze(self, extra: int) -> None:
        """Leave the processes ``extra`` bytes above what they use now."""
        self._limit.write_text(str(int(self._usage.read_text()) + extra))

    def relax(self) -> None:
        """Take the limit away."""
        self._limit.write_text(self._unlimited)

    def close(self) -> None:
        """Remove the group."""
        self._path.rmdir()


def memory_group(name: str) -> MemoryGroup | None:
    """Return a new control group below that of this process; None if there can be none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, below = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        for base, files in (
            (root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "-1")),
            (root, ("memory.max", "memory.current", "max")),
        ):
            path = base / below.lstrip("/") / name
            if controllers not in ("memory", ""):
                continue
            with contextlib.suppress(OSError):
                path.mkdir()
                if (path / files[0]).exists():
                    return MemoryGroup(path, *files)
                path.rmdir()
    return None


def _give_descriptors(ranks: dict[int, int]) -> None:
    """Let all processes of the run open files again: children have the limit of their parent."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for process in processes(ranks):
        with contextlib.suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)


@dataclass
class Faults:
    """Injects faults at random; ``run`` is what it is done to. One per run, with its own draws."""

    draw: random.Random
    root: Path
    disk: Path | None
    """A small file system that the run writes to, if there is one."""
    control: np.ndarray
    """One word for each proxy: pool, source."""
    clock: Path | None
    """File that says by how much clocks are moved, if they can be."""
    memory: MemoryGroup | None
    """The control group of the processes, if there can be one."""
    servers: dict[str, object]
    """Name -> something with ``pid``, ``kill()`` and ``start()``."""
    client: Callable[[], object] | None
    """Returns a client of the pool's server."""
    counts: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    excuse: float = 0.0
    """Until when (monotonic) the run may stand still because of a fault."""

    def count(self, kind: str, times: int = 1) -> None:
        """Note that a fault was injected."""
        self.counts[kind] = self.counts.get(kind, 0) + times

    @property
    def total(self) -> int:
        """Faults injected so far."""
        return sum(self.counts.values())

    def tend(self, *, everything: bool = False) -> None:
        """End the faults whose time is over, or all."""
        now = time.monotonic()
        due = [entry for entry in self.pending if everything or entry[0] <= now]
        self.pending = [entry for entry in self.pending if entry not in due]
        for _, end in due:
            with contextlib.suppress(ProcessLookupError):
                end()

    def later(self, shortest: float, longest: float, end: Callable[[], None]) -> None:
        """Have a fault end after a random time."""
        at = time.monotonic() + self.draw.uniform(shortest, longest)
        self.pending.append((at, end))
        self.excuse = max(self.excuse, at)

    # --- processes ---

    def kill(self, roles: tuple[str, ...], ranks: dict[int, int]) -> bool:
        """Kill a process of one of these roles."""
        victims = [process for process in processes(ranks) if process.role in roles]
        if not victims:
            return False
        victim = self.draw.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        self.count(f"killed: {victim.role}")
        return True

    def stop(self, ranks: dict[int, int]) -> bool:
        """Stop any process, and continue it later."""
        victims = [p for p in processes(ranks) if p.pid not in self.stopped]
        if not victims:
            return False
        pid = self.draw.choice(victims).pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stopped.add(pid)
            self.later(0.02, 0.6, lambda: self._continue(pid))
            self.count("stopped and continued")
        return True

    def _continue(self, pid: int) -> None:
        self.stopped.discard(pid)
        os.kill(pid, signal.SIGCONT)

    def descriptors(self, ranks: dict[int, int]) -> bool:
        """Leave a process next to no descriptors to open, for a while."""
        victims = processes(ranks)
        if not victims:
            return False
        pid = self.draw.choice(victims).pid
        try:
            highest = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
            limit = highest + 1 + self.draw.randrange(3)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))
        except (OSError, ValueError):
            return False
        self.later(0.05, 0.5, lambda: _give_descriptors(ranks))
        self.count("no descriptors left")
        return True

    def clock_jumps(self) -> bool:
        """Move the clock of all processes by up to ten years, forwards or back."""
        if self.clock is None:
            return False
        seconds = self.draw.choice([-1, 1]) * 10 ** self.draw.uniform(0, 8.5)
        set_clock(self.clock, seconds)
        self.count("clock jumped")
        return True

    def memory_limit(self) -> bool:
        """Leave the processes little memory for a while; the kernel may kill one of them."""
        if self.memory is None:
            return False
        self.memory.squeeze(int(10 ** self.draw.uniform(6, 8)))
        self.later(0.1, 1.0, self.memory.relax)
        self.count("memory limited")
        return True

    # --- files ---

    def full_disk(self) -> bool:
        """Fill the small file system, for a while."""
        if self.disk is None or (self.disk / BALLAST).exists():
            return False
        ballast = self.disk / BALLAST
        size, step = 0, 1 << 28
        with ballast.open("wb") as file:
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError:
                    step //= 4
        self.later(0.1, 1.0, lambda: ballast.unlink(True))
        self.count("disk full")
        return True

    def damage_disk(self) -> bool:
        """Flip bytes of a file on the small file system, or cut off its end."""
        if self.disk is None:
            return False
        files = [path for path in self.disk.rglob("*.stoker") if path.stat().st_size]
        if not files:
            return False
        path = self.draw.choice(files)
        size = path.stat().st_size
        if self.draw.random() < 0.2:
            os.truncate(path, self.draw.randrange(size))
            self.count("file truncated")
            return True
        with path.open("r+b", buffering=0) as file:
            for _ in range(self.draw.randint(1, 64)):
                at = self.draw.randrange(size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([(byte or b"\0")[0] ^ 1 << self.draw.randrange(8)]))
        self.count("bytes flipped on disk")
        return True

    # --- servers ---

    def damage_pool(self) -> bool:
        """Flip a bit of a value in the pool, or cut off its end."""
        if self.client is None:
            return False
        try:
            client = self.client()
            key = client.randomkey()  # type: ignore[attr-defined]
            value = client.get(key) if key else None  # type: ignore[attr-defined]
        except Exception:  # the server is gone, by another fault
            return False
        if not value:
            return False
        if self.draw.random() < 0.3:
            damaged = value[: self.draw.randrange(len(value))]
            kind = "value truncated in the pool"
        else:
            at = self.draw.randrange(len(value))
            damaged = (
                value[:at] + bytes([value[at] ^ 1 << self.draw.randrange(8)]) + value[at + 1 :]
            )
            kind = "bits flipped in the pool"
        with contextlib.suppress(Exception):
            client.set(key, damaged, keepttl=True)  # type: ignore[attr-defined]
            self.count(kind)
        return True

    def damage_wire(self, index: int, name: str, modes: tuple[Wire, ...]) -> bool:
        """Damage what passes on a wire."""
        if self.control[index] != Wire.PASS:
            return False
        mode = self.draw.choice(modes)
        self.control[index] = mode
        if mode == Wire.HOLD:
            self.later(0.1, 0.8, lambda: self.control.__setitem__(index, Wire.PASS))
        self.count(f"{name}'s wire: {mode.name.lower().replace('_', ' ')}")
        return True

    def lose_server(self) -> bool:
        """Kill a server, and start it again later."""
        if not self.servers:
            return False
        name = self.draw.choice(sorted(self.servers))
        server = self.servers[name]
        if any(getattr(end, "server", None) == name for _, end in self.pending):
            return False
        server.kill()  # type: ignore[attr-defined]

        def again() -> None:
            server.start()  # type: ignore[attr-defined]

        again.server = name  # type: ignore[attr-defined]
        self.later(0.1, 1.0, again)
        self.count(f"server lost: {name}")
        return True

    def remove_copy(self) -> bool:
        """Remove a copy from a tier, as something that cleans up old files would."""
        if self.disk is None:
            return False
        copies = [path for path in self.disk.rglob("*.jpg") if path.is_file()]
        if not copies:
            return False
        self.draw.choice(copies).unlink(True)
        self.count("copy removed")
        return True
