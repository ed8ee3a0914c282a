"""`stoker run` with real programs, the real shim and a real daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.tiering import layout
from stoker.tiering.free_room import file_system
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


def setup(source: Path, *quotas: int, options: tuple[str, ...] = ("--json",)) -> Setup:
    tiers = tuple((source.parent / f"tier{i}", quota) for i, quota in enumerate(quotas))
    return Setup(source, tiers, options)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


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
    # Of the first pass the large file and the empty one may be opened at the source.
    assert report["source"]["opens"] <= 2 + 2 and report["waits_given_up"] == 0
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


def test_with_room_for_a_part_the_rest_is_read_from_the_source(source: Path) -> None:
    expected = direct(*SUMS, source)
    done = setup(source, 100_000).run(*SUMS, source)
    assert done.out == expected
    report = done.report
    assert 0.9 * 100_000 < report["tiers"][0]["used"] <= 100_000
    assert report["refused"] == len(SIZES) - report["tiers"][0]["files"]


def test_a_tier_in_memory_before_one_on_disk(source: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or file_system(memory.stat().st_dev) != "tmpfs":
        pytest.skip("no file system in memory at /dev/shm")
    expected = direct(*SUMS, source)
    with tempfile.TemporaryDirectory(prefix="stoker-test-", dir=memory) as folder:
        tiers = ((Path(folder) / "tier", 200_000), (tmp_path / "disk", 20_000_000))
        for copied in (TOTAL, 0):
            done = Setup(source, tiers, ("--json",)).run(*SUMS, source)
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
    done = Setup(source, (), (f"--config={config}", "--json")).run(
        "cat", source / "a" / "01.bin", text=False
    )
    assert copies(tmp_path / "fast")["a/01.bin"] == (source / "a" / "01.bin").read_bytes()
    assert done.status == 0


def test_the_live_report(source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    it = setup(source, 1_000_000, options=(f"--report={report}", "--quiet"))
    script = f"cat {source}/a/* >/dev/null; echo ready; read line; cat {source}/b/* >/dev/null"
    process = it.start("sh", "-c", script, stdin=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "ready\n"
    wait_for(lambda: json.loads(report.read_text())["tiers"][0]["files"] == 20)
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
    wait_for(lambda: not Path(f"/proc/{daemon}").exists() or _is_zombie(daemon))
    assert not tables[0].exists()


def _daemon_pid(table: Path) -> int:
    return int(np.fromfile(table, layout.HEADER, 1)[0]["daemon_pid"])


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_daemon_ends_when_stoker_run_is_killed(source: Path, runtime_dir: Path) -> None:
    process = setup(source, 1_000_000).start("sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout and process.stdout.readline() == "ready\n"
    (table,) = runtime_dir.glob("tiering-*/table")
    child = int(direct("pgrep", "-P", str(process.pid)).split()[0])
    process.kill()
    process.wait(60)
    wait_for(lambda: not table.exists())
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
    wait_for(lambda: any((states(t) == layout.State.COPYING).any() for t in _tables(runtime_dir)))
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
    wait_for(lambda: any((states(t) == layout.State.COPYING).any() for t in _tables(runtime_dir)))
    daemon = _daemon_pid(_tables(runtime_dir)[0])
    os.kill(daemon, signal.SIGSTOP)
    time.sleep(4)  # a busy machine, or a cgroup that has used up its share, does the same
    os.kill(daemon, signal.SIGCONT)
    out, err = process.communicate(timeout=200)
    assert out == direct(sys.executable, "-c", read_all, huge)
    report = Done(0, out, err).report
    assert report["waits_given_up"] == 0
    assert report["source"]["bytes"] == 0, "nothing is read twice"
    assert report["source"]["copied_bytes"] == 1 << 28


def _tables(runtime_dir: Path) -> list[Path]:
    return list(runtime_dir.glob("tiering-*/table"))


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
    wait_for(lambda: "a/19.bin" in copies(tmp_path / "tier0"))
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
    wait_for(lambda: copies(tmp_path / "tier0").get("a/19.bin") == path.read_bytes())
    stop.touch()
    _, err = process.communicate(timeout=100)
    assert Done(0, "", err).report["dropped"] >= 1


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
    it = setup(source, quota, options=("--json", f"--order={order}"))
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
