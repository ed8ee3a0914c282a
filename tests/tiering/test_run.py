"""`stoker run` with real programs, the real shim and a real daemon."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import until

from stoker.errors import ConfigError
from stoker.tiering import launcher, layout
from stoker.tiering.tier_dir import file_system
from tiering.conftest import age, write_files
from tiering.runs import Done, Setup, direct

SIZES = {f"{folder}/{i:02d}.bin": 3_000 + 400 * i for folder in "ab" for i in range(20)} | {
    "c/name with\nnewline": 5_000,
    "c/\udcff\udcfe": 5_000,
    "empty": 0,
    "large": 9_000_000,
}
TOTAL = sum(SIZES.values())
SUMS = ("sh", "-c", 'cd "$0" && find . -type f -exec sha256sum -z {} + | sort -z | sha256sum')


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_files(tmp_path / "source", SIZES)
    return tmp_path / "source"


JSON = ("--json",)
WAITING = ("--json", "--small=16MiB")
"""Every file is copied before the program goes on: what is counted then is the same each time."""


def setup(source: Path, *quotas: int, options: tuple[str, ...] = WAITING) -> Setup:
    tiers = tuple((source.parent / f"tier{i}", quota) for i, quota in enumerate(quotas))
    return Setup(source, tiers, options)


def copies(tier: Path) -> dict[str, bytes]:
    root = tier / "copies"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def states(path: Path) -> np.ndarray[Any, Any]:
    """The states in a table; empty if there is none."""
    try:
        mapped = np.memmap(path, np.uint8, "r")
    except (FileNotFoundError, ValueError):
        return np.zeros(0, int)
    header = mapped[:4096].view(layout.HEADER)[0]
    begin = int(header["entries_offset"])
    entries = mapped[begin : begin + 128 * int(header["entry_count"])].view(layout.ENTRY)
    return np.asarray(entries["word"] & 0xFF)


def test_a_tree_is_the_same_three_times_and_the_source_is_read_once(source: Path) -> None:
    expected = direct(*SUMS, source)
    before = {p: p.stat() for p in source.rglob("*")}
    thrice = ("sh", "-c", f"for i in 1 2 3; do sh -c '{SUMS[2]}' \"$0\"; done")
    done = setup(source, 200_000, 20_000_000).run(*thrice, source)
    assert (done.status, done.out) == (0, 3 * expected)
    report = done.report
    tiers = report["tiers"]
    assert sum(tier["files"] for tier in tiers) == len(SIZES) - 1, "all but the empty one"
    assert [tier["used"] <= tier["quota"] for tier in tiers] == [True, True]
    assert report["source"]["copied_bytes"] == TOTAL
    # Each pass the empty one is opened at the source.
    assert report["source"]["opens"] <= 1 + 2 and report["waits_given_up"] == 0
    assert report["opens_avoided"] >= 3 * (len(SIZES) - 2) + 2
    placed = copies(source.parent / "tier0") | copies(source.parent / "tier1")
    assert placed == {name: (source / name).read_bytes() for name in SIZES if name != "empty"}
    after = {p: p.stat() for p in source.rglob("*")}
    for path, status in before.items():
        assert (status.st_mtime_ns, status.st_ctime_ns) == (
            after[path].st_mtime_ns,
            after[path].st_ctime_ns,
        ), "the source is never written"


def test_the_next_run_reads_nothing_again(source: Path) -> None:
    it = setup(source, 20_000_000)
    expected = it.run(*SUMS, source)
    again = it.run(*SUMS, source)
    assert again.out == expected.out
    report = again.report
    assert report["source"]["copied_bytes"] == 0
    assert report["tiers"][0]["reused"] == len(SIZES) - 1


@pytest.mark.parametrize("is_new_file", [True, False])
def test_t1_a_tree_rebuilt_with_the_same_sizes_and_times_is_read_anew(
    source: Path, is_new_file: bool
) -> None:
    it = setup(source, 20_000_000)
    it.run(*SUMS, source)
    for path in [p for p in source.rglob("*") if p.is_file()]:
        status, content = path.stat(), bytes(255 - byte for byte in path.read_bytes())
        if is_new_file:
            path.unlink()
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    rebuilt = it.run(*SUMS, source)
    assert rebuilt.out == direct(*SUMS, source)
    assert rebuilt.report["source"]["copied_bytes"] == TOTAL
    assert rebuilt.report["tiers"][0]["reused"] == 0


def test_with_room_for_a_part_the_rest_is_read_from_the_source(source: Path) -> None:
    (source / "empty").unlink()  # the only one whose open waits for no answer
    expected = direct(*SUMS, source)
    done = setup(source, 100_000).run(*SUMS, source)
    assert done.out == expected
    report = done.report
    assert 0.9 * 100_000 < report["tiers"][0]["used"] <= 100_000
    assert report["refused"] == len(SIZES) - 1 - report["tiers"][0]["files"]


def test_a_tier_in_memory_before_one_on_disk(source: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or file_system(memory.stat().st_dev) != "tmpfs":
        pytest.skip("no file system in memory at /dev/shm")
    expected = direct(*SUMS, source)
    with tempfile.TemporaryDirectory(prefix="stoker-test-", dir=memory) as folder:
        tiers = ((Path(folder) / "tier", 200_000), (tmp_path / "disk", 20_000_000))
        for copied in (TOTAL, 0):
            done = Setup(source, tiers, WAITING).run(*SUMS, source)
            assert (done.status, done.out) == (0, expected)
            assert done.report["source"]["copied_bytes"] == copied
            fast, slow = done.report["tiers"]
            assert 150_000 < fast["used"] <= 200_000
            assert fast["used"] + slow["used"] == TOTAL
        assert fast["reused"] + slow["reused"] == len(SIZES) - 1


@pytest.mark.parametrize("status", [0, 3, 255])
def test_exit_status_passes_through(source: Path, status: int) -> None:
    assert setup(source, 1_000_000).run("sh", "-c", f"exit {status}").status == status


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_signals_pass_through_and_the_report_comes_all_the_same(source: Path, name: str) -> None:
    script = f"trap 'echo got; exit 5' {name}; cat {source}/a/* >/dev/null; echo ready; "
    process = setup(source, 1_000_000).start("sh", "-c", f"{script} while :; do sleep 0.05; done")
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[f"SIG{name}"])
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (5, "got\n")
    assert Done(5, out, err).report["tiers"][0]["files"] == 20


def test_a_signal_that_kills_gives_128_and_its_number(source: Path) -> None:
    assert setup(source, 1_000_000).run("sh", "-c", "kill -KILL $$").status == 137


def test_a_command_that_is_not_there(source: Path) -> None:
    done = setup(source, 1_000_000).run("no-such-command")
    assert done.status == 127 and "no-such-command: command not found" in done.err


def test_errors_at_the_start_run_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("source = 'source'\nthreads = 0\n")
    it = Setup(source, (), (f"--config={tmp_path}/t.toml",))
    done = it.run("touch", tmp_path / "ran")
    assert done.status == 1 and "t.toml:2: threads=0" in done.err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    done = Setup(source, ((tmp_path / "other", 1000),)).run("touch", tmp_path / "ran")
    assert done.status == 1 and "not Stoker's (it holds 'thesis.txt')" in done.err
    done = Setup(source, ((tmp_path / "tier", 1 << 60),)).run("touch", tmp_path / "ran")
    assert done.status == 1 and "do not fit" in done.err
    it = setup(source, 1_000_000, options=(f"--report={tmp_path}/none/report.json",))
    done = it.run("touch", tmp_path / "ran")
    assert done.status == 1 and "cannot be written" in done.err
    assert not (tmp_path / "ran").exists() and (tmp_path / "other" / "thesis.txt").exists()


def test_a_tier_of_another_source_is_refused(source: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "second", {"x": 10})
    setup(source, 1_000_000).run("cat", source / "a" / "00.bin", text=False)
    done = setup(tmp_path / "second", 1_000_000).run("true")
    assert done.status == 1 and f"holds copies of {source}" in done.err


def test_a_configuration_file(source: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiers.toml"
    config.write_text("source = 'source'\n[[tier]]\npath = 'fast'\nsize = '1MiB'\n")
    done = Setup(source, (), (f"--config={config}", "--json", "--small=1MiB")).run(
        "cat", source / "a" / "01.bin", text=False
    )
    assert copies(tmp_path / "fast")["a/01.bin"] == (source / "a" / "01.bin").read_bytes()
    assert done.status == 0


def test_the_live_report(source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    it = setup(source, 1_000_000, options=(f"--report={report}", "--quiet", "--small=16MiB"))
    script = f"cat {source}/a/* >/dev/null; echo ready; read line; cat {source}/b/* >/dev/null"
    process = it.start("sh", "-c", script, stdin=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "ready\n"
    until(lambda: json.loads(report.read_text())["tiers"][0]["files"] == 20)
    _, err = process.communicate("go on\n", timeout=100)
    assert err == ""
    final = json.loads(report.read_text())
    assert final["tiers"][0]["files"] == 40 and final["daemon"]
    assert final["source"]["copied_bytes"] == final["tiers"][0]["used"]


def test_the_report_for_people(source: Path) -> None:
    done = setup(source, 1_000_000, options=()).run("cat", source / "a" / "00.bin", text=False)
    said = bytes(done.err).decode()  # type: ignore[arg-type]
    assert "stoker run" in said and "976.6 KiB" in said and "The source was read for" in said


def test_explain() -> None:
    done = Setup(Path("/"), (), ("--explain",)).run()
    assert done.status == 0
    for word in ("openat64", "statx", "static programs", "io_uring"):
        assert word in done.out


def test_two_runs_share_a_daemon(source: Path, runtime_dir: Path) -> None:
    it = setup(source, 20_000_000)
    wait = "echo ready; read line"
    first = it.start("sh", "-c", f"cat {source}/a/*.bin >/dev/null; {wait}", stdin=subprocess.PIPE)
    assert first.stdout and first.stdout.readline() == "ready\n"
    tables = list(runtime_dir.glob("tiering-*/table"))
    assert len(tables) == 1
    daemon = _daemon_pid(tables[0])
    other = setup(source, 30_000_000)
    second = other.run("sh", "-c", f"cat {source}/a/*.bin {source}/b/*.bin | sha256sum")
    assert second.status == 0 and _daemon_pid(tables[0]) == daemon
    assert "a running job's tiers of this source are used" in second.err
    assert second.report["tiers"][0]["quota"] == 20_000_000
    assert second.report["source"]["copied_bytes"] == sum(
        size for name, size in SIZES.items() if name.startswith("b/")
    ), "what the first had read is there"
    first.communicate("go on\n", timeout=100)
    until(lambda: not Path(f"/proc/{daemon}").exists() or _is_zombie(daemon))
    assert not tables[0].exists()


def _daemon_pid(table: Path) -> int:
    pid = int(np.fromfile(table, layout.HEADER, 1)[0]["daemon_pid"])
    assert pid > 0, "a signal to 0 would reach ourselves"
    return pid


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_daemon_ends_when_stoker_run_is_killed(source: Path, runtime_dir: Path) -> None:
    process = setup(source, 1_000_000).start("sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout and process.stdout.readline() == "ready\n"
    (table,) = runtime_dir.glob("tiering-*/table")
    child = int(direct("pgrep", "-P", str(process.pid)).split()[0])
    process.kill()
    process.wait(60)
    until(lambda: not table.exists())
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)


def test_daemon_killed_in_the_middle_of_a_copy(source: Path, runtime_dir: Path) -> None:
    huge = source / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 28)
    age(huge)
    it = setup(source, 1 << 29)
    read_all = (
        "import sys, zlib\ncrc = 0\nwith open(sys.argv[1], 'rb', buffering=0) as f:\n"
        "    while part := f.read(1 << 18): crc = zlib.crc32(part, crc)\nprint(crc)"
    )
    process = it.start(sys.executable, "-c", read_all, huge)
    until(lambda: _is_copying(runtime_dir))
    (table,) = _tables(runtime_dir)
    os.kill(_daemon_pid(table), signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert out == direct(sys.executable, "-c", read_all, huge)
    assert process.returncode == 0
    parts = list((source.parent / "tier0" / "parts").iterdir())
    assert len(parts) == 1, "it was in the middle"
    assert not Done(0, out, err).report["daemon"]
    again = it.run("sha256sum", source / "a" / "00.bin")
    assert again.out == direct("sha256sum", source / "a" / "00.bin")
    assert not list((source.parent / "tier0" / "parts").iterdir())
    assert again.report["tiers"][0]["used"] == SIZES["a/00.bin"], "the half copy counts no more"


def test_a_daemon_that_is_stopped_for_a_while(source: Path, runtime_dir: Path) -> None:
    huge = source / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 28)
    age(huge)
    read_all = (
        "import sys, zlib\ncrc = 0\nwith open(sys.argv[1], 'rb', buffering=0) as f:\n"
        "    while part := f.read(1 << 18): crc = zlib.crc32(part, crc)\nprint(crc)"
    )
    process = setup(source, 1 << 29).start(sys.executable, "-c", read_all, huge)
    until(lambda: _is_copying(runtime_dir))
    daemon = _daemon_pid(_tables(runtime_dir)[0])
    os.kill(daemon, signal.SIGSTOP)
    # A busy machine, or a cgroup that has used up its share, does the same.
    until(lambda: _waits(runtime_dir) or not _is_copying(runtime_dir))
    time.sleep(2)  # less than a program waits for a copy, by as much as a busy machine may need
    os.kill(daemon, signal.SIGCONT)
    out, err = process.communicate(timeout=200)
    assert out == direct(sys.executable, "-c", read_all, huge)
    report = Done(0, out, err).report
    assert report["waits_given_up"] == 0
    assert report["source"]["bytes"] < 16 << 20, "what is copied meanwhile is not read twice"
    assert report["source"]["copied_bytes"] == 1 << 28


def _tables(runtime_dir: Path) -> list[Path]:
    return list(runtime_dir.glob("tiering-*/table"))


def _is_copying(runtime_dir: Path) -> bool:
    return any((states(table) == layout.State.COPYING).any() for table in _tables(runtime_dir))


def _waits(runtime_dir: Path) -> int:
    """How often programs have begun to wait for a copy."""
    (counters,) = runtime_dir.glob("tiering-*/counters")
    return int(layout.read_counters(counters, 1)["waits"])


LOOP = """
import hashlib, pathlib, sys, time
path, stop = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
while not stop.exists():
    print(hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("change", ["replace", "truncate", "rewrite"])
def test_a_source_that_changes_during_the_run(source: Path, tmp_path: Path, change: str) -> None:
    path, stop = source / "a" / "19.bin", tmp_path / "stop"
    it = setup(source, 20_000_000, options=("--json", "--revalidate=0.3"))
    process = it.start(sys.executable, "-c", LOOP, path, stop)
    assert process.stdout
    first = process.stdout.readline()
    assert first.split() == direct("sha256sum", path).split()[:1]
    until(lambda: "a/19.bin" in copies(tmp_path / "tier0"))
    if change == "truncate":
        os.truncate(path, 1000)
    elif change == "rewrite":
        path.write_bytes(os.urandom(path.stat().st_size))
    else:
        write_files(tmp_path, {"fresh": 12_345})
        (tmp_path / "fresh").rename(path)
    wanted = direct("sha256sum", path).split()[0]
    changed = time.monotonic()
    seen = {first.strip()}
    while (line := process.stdout.readline().strip()) != wanted:
        seen.add(line)
        assert time.monotonic() - changed < 60
    assert len(seen) == 1, "the old content or the new one, nothing else"
    age(path)
    until(lambda: copies(tmp_path / "tier0").get("a/19.bin") == path.read_bytes())
    stop.touch()
    _, err = process.communicate(timeout=100)
    assert Done(0, "", err).report["dropped"] >= 1


ASK = """
import sys
for line in sys.stdin:
    try:
        print(ascii(open(line.rstrip("\\n"), "rb").read().decode("latin-1")), flush=True)
    except OSError as error:
        print(ascii(type(error).__name__), flush=True)
"""


def until_placed(runtime_dir: Path, count: int) -> None:
    def placed() -> int:
        return sum(int((states(t) == layout.State.PLACED).sum()) for t in _tables(runtime_dir))

    until(lambda: placed() == count)


class Asked:
    """A program under `stoker run` that reads a file whenever it is told to."""

    def __init__(self, it: Setup, runtime_dir: Path) -> None:
        self._process = it.start(sys.executable, "-c", ASK, stdin=subprocess.PIPE)
        self._runtime_dir = runtime_dir
        self.err = ""

    def __call__(self, path: Path) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        said: str = ast.literal_eval(self._process.stdout.readline())
        return said

    def until_placed(self, count: int) -> None:
        until_placed(self._runtime_dir, count)

    def end(self) -> dict[str, Any]:
        _, self.err = self._process.communicate(timeout=100)
        assert self._process.returncode == 0, self.err
        return Done(0, "", self.err).report


def two_versions(folder: Path) -> tuple[Path, Path]:
    """Two directories that differ in nothing but the bytes of a file."""
    for name in ("v1", "v2"):
        write_files(folder / name, {"sub/x": 2})
        (folder / name / "sub" / "x").write_text(name)
        os.utime(folder / name / "sub" / "x", ns=(10**18, 10**18))
    return folder / "v1", folder / "v2"


@pytest.mark.parametrize("named", ["by a link", "plainly"])
def test_t4_another_directory_takes_the_name_of_the_source(
    tmp_path: Path, runtime_dir: Path, named: str
) -> None:
    first, second = two_versions(tmp_path)
    source = tmp_path / "current"
    if named == "by a link":
        source.symlink_to(first)
    else:
        first.rename(source)
    asked = Asked(setup(source, 1000, options=JSON), runtime_dir)
    assert asked(source / "sub/x") == "v1"
    asked.until_placed(1)
    assert asked(source / "sub/x") == "v1"
    if named == "by a link":
        (tmp_path / "new").symlink_to(second)
        (tmp_path / "new").replace(source)
    else:
        source.rename(first)
        second.rename(source)
        time.sleep(0.02)  # a path without a link is looked at once in a tick of the coarse clock
    assert [asked(source / "sub/x") for _ in range(3)] == ["v2"] * 3, "as without Stoker"
    if named == "by a link":
        assert asked(first / "sub/x") == "v1"
    report = asked.end()
    assert report["elsewhere"] == 3 and report["tiers"][0]["opens"] >= 1
    assert asked.err.count("leads to another directory than at the start") == 1


EXCHANGING = """
import os, sys
source, other, away = sys.argv[1:]
read = lambda: open(f"{source}/sub/x").read()
print(read(), flush=True)
sys.stdin.readline()
for _ in range(100):
    seen = [read()]
    os.rename(source, away)
    os.rename(other, source)
    seen.append(read())
    os.rename(source, other)
    os.rename(away, source)
    assert seen == ["v1", "v2"], seen
"""


def test_t4_a_program_that_exchanges_the_source_itself_sees_it_at_once(
    tmp_path: Path, runtime_dir: Path
) -> None:
    source, other = two_versions(tmp_path)
    process = setup(source, 1000, options=JSON).start(
        sys.executable, "-c", EXCHANGING, source, other, tmp_path / "away", stdin=subprocess.PIPE
    )
    try:
        until_placed(runtime_dir, 1)
    finally:
        out, err = process.communicate("go\n", timeout=100)
    assert (out, process.returncode) == ("v1\n", 0), err
    assert Done(0, out, err).report["elsewhere"] >= 100


@pytest.mark.parametrize("place", ["", "sub"])
def test_t3_another_directory_is_mounted_over_the_source(
    tmp_path: Path, runtime_dir: Path, place: str
) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a mount namespace: unshare -m fails")
    source, other = two_versions(tmp_path)
    inside = f"mount --bind {other / place} {source / place} && cat {source}/sub/x {source}/sub/x"
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    script = f"cat {source}/sub/x; {wait}; cat {source}/sub/x; unshare -m sh -c '{inside}'"
    process = setup(source, 1000, options=JSON).start("sh", "-c", script)
    try:
        until_placed(runtime_dir, 1)
    finally:
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=100)
    assert (out, process.returncode) == ("v1v1v2v2", 0), err
    report = Done(0, out, err).report
    assert (report["elsewhere"] if place == "" else report["changes"]) > 0
    assert report["tiers"][0]["opens"] == 1, "outside, where the source is what it was"


def test_t5_no_open_waits_for_a_copy(source: Path, runtime_dir: Path) -> None:
    # Reads of a large file may wait for a copy that is under way, opens never.
    names = [name for name, size in SIZES.items() if 0 < size < 1 << 20 and name.isprintable()]
    asked = Asked(setup(source, 20_000_000, options=JSON), runtime_dir)
    assert asked(source / "empty") == "", "by now the daemon is there"
    daemon = _daemon_pid(_tables(runtime_dir)[0])
    os.kill(daemon, signal.SIGSTOP)
    try:
        path = source / "text"
        path.write_text("of the source")
        age(path)
        assert asked(path) == "of the source", "read while nobody copies"
    finally:
        os.kill(daemon, signal.SIGCONT)
    for name in names:
        assert asked(source / name).encode("latin-1") == (source / name).read_bytes()
    asked.until_placed(len(names) + 1)
    assert asked(path) == "of the source"
    report = asked.end()
    assert (report["waits"], report["requests_lost"]) == (0, 0)
    assert report["source"]["opens"] == len(names) + 2 and report["tiers"][0]["opens"] == 1


def test_t6_a_placed_file_is_opened_without_a_look_at_its_source(
    source: Path, runtime_dir: Path
) -> None:
    path = source / "text"
    path.write_text("of the source")
    age(path)
    it = setup(source, 1_000_000, options=("--json", "--revalidate=0.2"))
    asked = Asked(it, runtime_dir)
    assert asked(path) == "of the source"
    asked.until_placed(1)
    daemon = _daemon_pid(_tables(runtime_dir)[0])
    os.kill(daemon, signal.SIGSTOP)  # nobody looks for changes now
    try:
        path.rename(source / "gone")
        time.sleep(0.3)
        assert asked(path) == "of the source"
    finally:
        os.kill(daemon, signal.SIGCONT)
    # The daemon looks: within the time that was asked for, not when the program opens the file.
    until(lambda: not (states(_tables(runtime_dir)[0]) == layout.State.PLACED).any())
    assert asked(path) == "FileNotFoundError"
    assert asked.end()["changes"] >= 1


def test_tiers_that_vanish_or_lose_their_copies(source: Path, tmp_path: Path) -> None:
    script = "sha256sum a/*; echo ready >&2; read line; sha256sum a/* b/*; sleep 1"
    process = setup(source, 50_000, 20_000_000).start(
        "sh", "-c", script, cwd=source, stdin=subprocess.PIPE
    )
    assert process.stderr and process.stderr.readline() == "ready\n"
    shutil.rmtree(tmp_path / "tier0")
    (tmp_path / "tier1" / "copies").rename(tmp_path / "gone")
    out, err = process.communicate("go on\n", timeout=100)
    expected = direct("sh", "-c", "sha256sum a/*; sha256sum a/* b/*", cwd=source)
    assert (process.returncode, out) == (0, expected)
    assert "tier0 has vanished" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_file_system_that_is_full(source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "small"
    mountpoint.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "stoker-test", str(mountpoint)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        it = Setup(source, ((mountpoint / "t", 900_000), (tmp_path / "t", 20_000_000)), ("--json",))
        fill = f"head -c 980000 /dev/zero > {mountpoint}/others"
        both = "sha256sum a/* b/* large"
        done = it.run("sh", "-c", f"{fill}; {both}; sleep 3; {both}", cwd=source)
        assert done.status == 0 and done.out == 2 * direct("sh", "-c", both, cwd=source)
        report = done.report
        assert report["tiers"][0]["failures"] >= 1 and report["tiers"][1]["files"] >= 30
        assert sum(tier["files"] for tier in report["tiers"]) >= 40
        assert "No space left on device" in report["problems"]
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("used_before", [False, True])
def test_a_file_system_that_was_full_before(
    source: Path, tmp_path: Path, used_before: bool
) -> None:
    mountpoint = tmp_path / "small"
    mountpoint.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "stoker-test", str(mountpoint)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        it = Setup(source, ((mountpoint / "t", 500_000),), WAITING)
        if used_before:
            assert it.run("sh", "-c", "cat a/* | wc -c", cwd=source).report["tiers"][0]["files"]
        with (mountpoint / "others").open("wb", buffering=0) as file:
            for block in 65536, 4096:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(block))
        done = it.run("sh", "-c", "sha256sum a/* b/*; exit 3", cwd=source)
        assert done.status == 3
        assert done.out == direct("sh", "-c", "sha256sum a/* b/*", cwd=source)
        assert used_before or f"programs read {source} without copies: " in done.err
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


def test_a_tier_that_is_read_only_from_the_start(source: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        tier = Path("/proc/stoker-tier")
    else:
        (tmp_path / "ro").mkdir(mode=0o500)
        tier = tmp_path / "ro" / "tier"
    done = Setup(source, ((tier, 1000),)).run("true")
    assert done.status == 1 and f"tier '{tier}' cannot be used" in done.err


def test_the_order_decides(source: Path, tmp_path: Path) -> None:
    order = tmp_path / "warm.txt"
    order.write_text("".join(f"b/{i:02d}.bin\n" for i in (7, 3, 19)))
    quota = sum(SIZES[f"b/{i:02d}.bin"] for i in (7, 3, 19))
    it = setup(source, quota, options=(*WAITING, f"--order={order}"))
    done = it.run("sh", "-c", "cat a/*.bin b/*.bin | sha256sum", cwd=source)
    assert done.status == 0
    assert done.report["order"] == {"listed": 3, "placed": 3, "outside": 0}
    assert sorted(copies(tmp_path / "tier0")) == ["b/03.bin", "b/07.bin", "b/19.bin"]


def test_many_small_files(source: Path, tmp_path: Path, soak: float) -> None:
    count = 100_000 if soak else 5_000
    many = tmp_path / "many"
    for folder in range(count // 1000):
        (many / f"{folder:03d}").mkdir(parents=True)
    changed = time.time() - 3600
    for number in range(count):
        path = many / f"{number // 1000:03d}" / f"{number % 1000:03d}.bin"
        path.write_bytes(number.to_bytes(8, "big") * 375)
        os.utime(path, (changed, changed))
    program = (
        "import glob, sys\nfor name in sorted(glob.glob(sys.argv[1] + '/*/*')):\n"
        "    with open(name, 'rb') as f: assert f.read()[:8] == "
        "(int(name[-11:-8]) * 1000 + int(name[-7:-4])).to_bytes(8, 'big')"
    )
    done = setup(many, count * 3_000).run(sys.executable, "-c", f"{program}\n" * 2, many)
    assert done.status == 0, done.err
    report = done.report
    assert report["tiers"][0]["files"] == count and report["source"]["copied_bytes"] == count * 3000
    paths = count * len("000/000.bin ")
    assert (report["table_bytes"] - paths) / count < 200
    assert report["waits_given_up"] == 0


def test_a_multithreaded_reader_while_files_are_placed_under_it(source: Path) -> None:
    program = """
import concurrent.futures, hashlib, pathlib, random, sys
root = pathlib.Path(sys.argv[1])
names = sorted(p for p in root.rglob("*") if p.is_file())
def read(seed):
    order = random.Random(seed).sample(names, len(names))
    return {p: hashlib.sha256(p.read_bytes()).digest() for p in order}
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for sums in pool.map(read, range(16)):
        for p in names: print(sums[p].hex())
"""
    expected = direct(sys.executable, "-c", program, source)
    done = setup(source, 60_000, 20_000_000).run(sys.executable, "-c", program, source)
    assert done.status == 0 and done.out == expected


@pytest.mark.parametrize("how", ["itself", "fork", "program"])
def test_t2_a_program_reads_what_it_changed(how: str, source: Path, tmp_path: Path) -> None:
    program = (sys.executable, Path(__file__).with_name("changing.py"))
    twin = shutil.copytree(source, tmp_path / "twin")
    expected = direct(*program, twin, how)
    done = setup(source, 20_000_000).run(*program, source, how)
    assert (done.status, done.out) == (0, expected), done.err


def test_a_build_without_the_preload_library_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_core_file", str(tmp_path / "_core.so"))
    with pytest.raises(ConfigError, match=r"libstoker_preload\.so is missing: .* needs glibc"):
        launcher.shim_file(launcher._LIBRARY)
    with pytest.raises(ConfigError, match="no preload library"):
        launcher.explain()


PLAIN = """
import os, resource, sys
from pathlib import Path
from stoker.tiering.config import Config, TierConfig
from stoker.tiering.launcher import run
source, tier, spare = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
config = Config(source, (TierConfig(tier, 10_000_000),), source)
pads = [os.open("/", os.O_RDONLY) for _ in range(8)]  # which the command does not inherit
resource.setrlimit(resource.RLIMIT_NOFILE, (pads[-1] + 1 + spare, 4096))
said = lambda text: os.write(2, text.encode())
command = ["sh", "-c", "cat $0/a/00.bin | wc -c; exit 3", str(source)]
sys.exit(run(config, command, None, print, said))
"""


@pytest.mark.parametrize("spare", range(8))
def test_without_descriptors_to_spare_the_command_runs_all_the_same(
    source: Path, spare: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, source, source.parent / "tier", str(spare)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("3000\n")
    if spare == 0:
        assert f"programs read {source} without copies: " in done.stderr
