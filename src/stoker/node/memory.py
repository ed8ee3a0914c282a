"""Memory of this process: how much it may still use, and what becomes of what it frees.

What it may use is free memory and every cgroup limit above it.
A container's limit is usually far below the machine's memory, and a limit may sit on any ancestor
of the process's own group, so all of them are read, in both cgroup versions (which one machine may
mount at the same time).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest multiple of a page
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT = 128 << 20  # bytes of freed memory that a process keeps at most
_LARGEST = 32 << 20  # bytes that one piece of it has at most; glibc takes no more
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class CgroupLimit:
    """One limit on memory in force for this process."""

    path: str
    """Folder of the group."""
    version: int
    """1 or 2."""
    limit: int
    """Maximum bytes that the group may use."""
    used: int
    """Bytes that it uses now, without the page cache that the kernel would drop first."""

    @property
    def available(self) -> int:
        """Bytes that the group may still take."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class Memory:
    """Memory of the machine and of the groups around this process."""

    total: int
    """Of the machine, in bytes."""
    free: int
    """Bytes that could be used without swapping (MemAvailable)."""
    cgroups: tuple[CgroupLimit, ...]
    """Every limit in force, nearest group first."""

    @property
    def available(self) -> int:
        """Bytes that this process may still take: the least of all the above."""
        return min([self.free, *(group.available for group in self.cgroups)])


def read_memory(proc: Path = Path("/proc")) -> Memory:
    """Return the memory as this process sees it. ``proc`` is replaced in tests.

    A file that is missing or cannot be read means that there is no limit to be known from it.
    """
    facts: dict[str, int] = {}
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) * 1024
    total = facts.get("MemTotal", 0)
    return Memory(total, facts.get("MemAvailable", total), tuple(_cgroup_limits(proc)))


def keep_freed_memory() -> None:
    """Have the C library keep what is freed in this process for what is needed next.

    For processes that take and free large pieces all the time, batches or objects: memory fresh
    from the kernel, which has to be cleared, took more of their time than all the rest. At most
    128 MiB are kept, and what the user has set stays. It holds until the process ends.
    """
    if not any(name in os.environ for name in _USERS_OWN):
        with contextlib.suppress(AttributeError):  # a C library that has no such thing
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, _LARGEST)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _cgroup_limits(proc: Path) -> list[CgroupLimit]:
    """Return every limit between this process's groups and the roots of their hierarchies."""
    found = []
    for version, top, group in memory_groups(proc):
        folder = group
        while True:
            limit = _read_limit(folder, version)
            if limit is not None:
                found.append(limit)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return found


def memory_groups(proc: Path = Path("/proc")) -> list[tuple[int, Path, Path]]:
    """Return (version, mount point, own group's folder) for each mounted memory hierarchy."""
    own: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    groups = []
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = [*after.split(), "", ""][:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version == 1 and "memory" not in options.split(","):
            continue
        if version in own:
            # A container sees its own group mounted as the root; the path may lie above it.
            below = Path("/") / own[version]
            inside = below.relative_to(root) if below.is_relative_to(root) else Path()
            groups.append((version, Path(mount), Path(mount) / inside))
    return groups


def _read_limit(folder: Path, version: int) -> CgroupLimit | None:
    limit_name, used_name, inactive_name = _V2 if version == 2 else _V1
    limit = _number(folder / limit_name)
    if limit is None or limit >= _NO_LIMIT:
        return None
    inactive = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == inactive_name:
            inactive = int(value)
    used = (_number(folder / used_name) or 0) - inactive
    return CgroupLimit(str(folder), version, limit, max(0, used))


def _number(path: Path) -> int | None:
    """Return the whole number in a file; None for "max" or when there is no such file."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
