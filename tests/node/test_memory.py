"""Free memory and cgroup limits, read from made-up trees in the kernel's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.node.memory import CgroupLimit, read_memory

GIB = 1 << 30


class Tree:
    """A /proc and its cgroup mounts under a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB")

    def write(self, path: str, text: str | int) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def mount(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join(lines))

    def v2(self, root: str = "/") -> str:
        return f"30 24 0:26 {root} {self.folder}/cg2 rw - cgroup2 cgroup2 rw,nsdelegate"

    def v1(self, controllers: str = "memory") -> str:
        return f"31 24 0:27 / {self.folder}/cg1 rw - cgroup cgroup rw,{controllers}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_cgroups_the_free_memory_counts(tree: Tree) -> None:
    memory = read_memory(tree.proc)
    assert (memory.total, memory.free, memory.available) == (16 * GIB, 8 * GIB, 8 * GIB)
    assert memory.cgroups == ()


def test_every_ancestor_with_a_limit_counts_in_version_2(tree: Tree) -> None:
    tree.mount(tree.v2())
    tree.write("proc/self/cgroup", "0::/pod/job")
    tree.write("cg2/pod/job/memory.max", "max")
    tree.write("cg2/pod/memory.max", 4 * GIB)
    tree.write("cg2/pod/memory.current", 3 * GIB)
    tree.write("cg2/pod/memory.stat", f"anon 1\ninactive_file {GIB}")
    memory = read_memory(tree.proc)
    assert memory.cgroups == (CgroupLimit(f"{tree.folder}/cg2/pod", 2, 4 * GIB, 2 * GIB),)
    assert memory.available == 2 * GIB


def test_version_1_and_its_way_to_say_no_limit(tree: Tree) -> None:
    tree.mount(tree.v1("cpu,cpuacct"), tree.v1("memory"), tree.v2())
    tree.write("proc/self/cgroup", "3:cpu,cpuacct:/\n4:memory:/a/b\n0::/")
    tree.write("cg1/memory.limit_in_bytes", 9223372036854771712)
    tree.write("cg1/a/b/memory.limit_in_bytes", GIB)
    tree.write("cg1/a/b/memory.usage_in_bytes", 2 * GIB)
    memory = read_memory(tree.proc)
    assert [(g.version, g.limit) for g in memory.cgroups] == [(1, GIB)]
    assert memory.available == 0


def test_a_container_that_sees_its_own_group_as_the_root(tree: Tree) -> None:
    tree.mount(tree.v2(root="/docker/abc"))
    tree.write("proc/self/cgroup", "0::/docker/abc/inner")
    tree.write("cg2/memory.max", 2 * GIB)
    tree.write("cg2/memory.current", GIB)
    assert read_memory(tree.proc).available == GIB


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert 0 < memory.available <= memory.free <= memory.total
