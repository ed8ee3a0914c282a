"""Many small files under `stoker run`: what the first reading costs more, and what later ones do.

A program reads files of 3 KB one after the other, twice, and notes how long each took from before
its open to after its close; without Stoker, and with room for all of them on an empty tier, in
interleaved rounds. Between the readings it waits until all copies are made. Source and tier lie on
one local file system, so that all that is added is Stoker's own: at the first reading the notes to
the daemon and its copying beside the program, at the second an open of the copy. The longest of
all is what a reader would see as a stall.

Then the same on slow storage (FUSE, 1 ms an open, 1 ms a read), which counts what it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from feed_servers import Unavailable, slow_folder
from harness import Report, interleave, paired_ratio, parser, show
from slow_counts import Counts

SIZE, PER_FOLDER = 3_000, 1_000  # bytes of a file, files of a folder
BYTES_A_FILE = 200  # of the table, beside the path
STALL_MS = 100.0  # what a person would notice
OPEN_MS = READ_MS = 1.0
MORE_LOCAL, MORE_SLOW = 1.5, 1.05  # times a first reading without Stoker
_PROGRAM = """
import glob, sys, time
names = sorted(glob.glob(sys.argv[1] + "/*/*"))
for _ in range(2):
    took = []
    for name in names:
        began = time.perf_counter()
        with open(name, "rb", buffering=0) as file:
            data = file.read()
        took.append(time.perf_counter() - began)
        assert len(data) == 3000 and data[:8] == data[-8:]
    print(*took, flush=True)
    sys.stdin.readline()
"""


@dataclass
class Passes:
    """What came of a run: milliseconds that each file took, in either reading."""

    took: list[np.ndarray]
    told: dict[str, Any]
    """The report of `stoker run`; empty without it."""
    settled: float = 0.0
    """Seconds from the end of the first reading until all copies were made."""
    operations: tuple[int, int] = (0, 0)
    """What the storage was asked for, in either reading and the time after it."""


def main() -> None:
    """Write the files, read them without and with Stoker, print the table."""
    options = parser(__doc__)
    options.add_argument("--files", type=int, default=100_000, help="how many (default 100,000)")
    options.add_argument("--slow-files", type=int, default=3_000, help="on slow storage")
    args = options.parse_args()
    if args.smoke:
        args.files, args.slow_files, args.rounds = 2_000, 200, 1
    report = Report("Many small files under stoker run", args.smoke)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        local(report, Path(folder) / "local", args)
        try:
            slow(report, Path(folder) / "slow", args)
        except Unavailable as error:
            report.remarks.append(str(error))
    show(args, report)


def local(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Compare on a local disk."""
    write(folder / "source", args.files)
    plain, under = compare(folder / "source", args.files, args.rounds, None)
    for who, runs in (("plain", plain), ("stoker run", under)):
        add_rows(report, f"local, {who}", runs)
    judge(report, "local", plain, under, MORE_LOCAL)
    for number in (0, 1):
        longest = statistics.median(float(run.took[number].max()) for run in under)
        report.target(f"longest file of reading {number + 1}", longest, STALL_MS, "ms")
    told = under[-1].told
    each = (told["table_bytes"] - args.files * len("000/000.bin ")) / args.files
    report.target("table beside the path", each, BYTES_A_FILE, "B a file")
    remark(report, "local", under)


def slow(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Compare on slow storage."""
    write(folder / "source", args.slow_files)
    counts_file = folder / "counts"
    counts = Counts(counts_file)
    with slow_folder(folder / "source", OPEN_MS, READ_MS, 0, 0, counts_file) as far:
        plain, under = compare(far, args.slow_files, args.rounds, counts)
    for who, runs in (("plain", plain), ("stoker run", under)):
        add_rows(report, f"slow, {who}", runs)
    judge(report, "slow", plain, under, MORE_SLOW)
    asked = statistics.median(run.operations[0] for run in plain)
    more = statistics.median(run.operations[0] for run in under) / asked
    report.target("slow: operations of reading 1 and of the copying, to plain", more, MORE_SLOW)
    report.target("slow: operations of reading 2", max(run.operations[1] for run in under), 0)
    remark(report, "slow", under)


def compare(
    source: Path, count: int, rounds: int, counts: Counts | None
) -> tuple[list[Passes], list[Passes]]:
    """Return the runs without and with Stoker, of the same rounds."""
    runs: dict[str, list[Passes]] = {"plain": [], "under": []}

    def once(who: str, tiers: Path) -> float:
        prefix, told = _tier(source, tiers, count)
        start, file = (prefix, told) if who == "under" else ([], None)
        runs[who].append(passes([*start, *_program(source)], file, count, counts))
        return float(runs[who][-1].took[0].sum())

    with tempfile.TemporaryDirectory(prefix="stoker-tiers-") as tiers:
        interleave({who: lambda who=who: once(who, Path(tiers)) for who in runs}, rounds)
    return runs["plain"][1:], runs["under"][1:]


def _program(source: Path) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, str(source)]


def _tier(source: Path, folder: Path, count: int) -> tuple[list[str], Path]:
    """Return what stands before a command, and where the report comes to lie; on an empty tier.

    Tiers stay to the end: the disk would still be busy with their removal when the next is timed.
    """
    tier = tempfile.mkdtemp(dir=folder)
    told = Path(tier) / "report.json"
    start = [sys.executable, "-c", "from stoker.cli import main; main()", "run", "--quiet"]
    where = [f"--source={source}", f"--tier={tier}/tier:{count * SIZE}", f"--report={told}"]
    os.sync()
    return [*start, *where, "--"], told


def write(source: Path, count: int) -> None:
    """Write files of 3 KB, an hour old: younger ones would not be copied."""
    changed = time.time() - 3600
    for number in range(count):
        path = source / f"{number // PER_FOLDER:03d}" / f"{number % PER_FOLDER:03d}.bin"
        if number % PER_FOLDER == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(number.to_bytes(8, "big") * (SIZE // 8))
        os.utime(path, (changed, changed))


def passes(command: list[str], told: Path | None, count: int, counts: Counts | None) -> Passes:
    """Run the program, with a pause between its readings until all is copied."""
    took, asked, settled = [], [counts.asked().operations if counts else 0], 0.0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        for _ in range(2):
            took.append(np.array(process.stdout.readline().split(), float) * 1e3)
            began = time.monotonic()
            while told and json.loads(told.read_text())["tiers"][0]["files"] < count:
                time.sleep(0.1)
            settled = settled or time.monotonic() - began
            asked.append(counts.asked().operations if counts else 0)
            process.stdin.write("continue\n")
            process.stdin.flush()
    assert process.returncode == 0 and all(len(times) == count for times in took)
    report = json.loads(told.read_text()) if told else {}
    return Passes(took, report, settled, (asked[1] - asked[0], asked[2] - asked[1]))


def add_rows(report: Report, who: str, runs: list[Passes]) -> None:
    """Add the two rows of a program: medians over the rounds."""
    for number in (0, 1):
        times = [run.took[number] for run in runs]
        report.row(
            who=who,
            reading=number + 1,
            seconds=statistics.median(float(t.sum() / 1e3) for t in times),
            median_ms=statistics.median(float(np.median(t)) for t in times),
            p99_9_ms=statistics.median(float(np.quantile(t, 0.999)) for t in times),
            longest_ms=statistics.median(float(t.max()) for t in times),
        )


def judge(
    report: Report, where: str, plain: list[Passes], under: list[Passes], limit: float
) -> None:
    """Hold the time of the first reading against the goal; say what the second takes."""
    first, second = (
        [[float(run.took[number].sum()) for run in runs] for runs in (under, plain)]
        for number in (0, 1)
    )
    report.target(f"{where}: reading 1 to plain", paired_ratio(*first), limit)
    report.remarks.append(f"{where}: reading 2 to plain: {paired_ratio(*second):.3g}")


def remark(report: Report, where: str, under: list[Passes]) -> None:
    """Say what became of the requests, and how long the copies took."""
    waits, lost = (max(run.told[name] for run in under) for name in ("waits", "requests_lost"))
    settled = statistics.median(run.settled for run in under)
    report.remarks.append(
        f"{where}: all copies are made {settled:.1f} s after reading 1; waits: {waits}, "
        f"requests lost: {lost}"
    )


if __name__ == "__main__":
    main()
