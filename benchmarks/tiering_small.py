"""Many small files under `stoker run`: the longest that any takes, and the memory of the table.

A program reads 100,000 files of 3 KB one after the other, twice, and notes how long each took from
before its open to after its close; without Stoker, and with room for all of them on an empty tier.
Source and tier lie on one local file system, so that all that is added is Stoker's own: at the
first reading a request, a copy and a wake-up a file, at the second an open of the copy. The longest
of all is what a reader would see as a stall.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, parser

SIZE, PER_FOLDER = 3_000, 1_000  # bytes of a file, files of a folder
BYTES_A_FILE = 200  # of the table, beside the path
STALL_MS = 100.0  # what a person would notice
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
"""


def main() -> None:
    """Write the files, read them without and with Stoker, print the table."""
    options = parser(__doc__)
    options.add_argument("--files", type=int, default=100_000, help="how many (default 100,000)")
    args = options.parse_args()
    count = 2_000 if args.smoke else args.files
    report = Report("Many small files under stoker run", args.smoke)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        source, tier = Path(folder) / "source", Path(folder) / "tier"
        write(source, count)
        program = [sys.executable, "-c", _PROGRAM, str(source)]
        show(report, "plain", passes(program))
        start = [sys.executable, "-c", "from stoker.cli import main; main()", "run", "--quiet"]
        told = Path(folder) / "report.json"
        start += [f"--source={source}", f"--tier={tier}:{count * SIZE}", f"--report={told}", "--"]
        under = passes(start + program)
        show(report, "stoker run", under)
        judge(report, json.loads(told.read_text()), under, count)
    report.show(args.json)


def write(source: Path, count: int) -> None:
    """Write files of 3 KB, an hour old: younger ones would not be copied."""
    changed = time.time() - 3600
    for number in range(count):
        path = source / f"{number // PER_FOLDER:03d}" / f"{number % PER_FOLDER:03d}.bin"
        if number % PER_FOLDER == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(number.to_bytes(8, "big") * (SIZE // 8))
        os.utime(path, (changed, changed))


def passes(command: list[str]) -> list[np.ndarray]:
    """Run the program; return the milliseconds that each file took, in either pass."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [np.array(line.split(), float) * 1e3 for line in done.stdout.splitlines()]


def show(report: Report, who: str, took: list[np.ndarray]) -> None:
    """Add the two rows of a program."""
    for number, times in enumerate(took, start=1):
        report.row(
            who=who,
            reading=number,
            seconds=float(times.sum() / 1e3),
            median_ms=float(np.median(times)),
            p99_9_ms=float(np.quantile(times, 0.999)),
            longest_ms=float(times.max()),
        )


def judge(report: Report, told: dict[str, Any], took: list[np.ndarray], count: int) -> None:
    """Hold the longest wait and the table's memory against the goals."""
    assert told["tiers"][0]["files"] == count, "not all is placed"
    for number, times in enumerate(took, start=1):
        report.target(f"longest file of reading {number}", float(times.max()), STALL_MS, "ms")
    paths = count * len("000/000.bin ")
    each = (told["table_bytes"] - paths) / count
    report.target("table beside the path", each, BYTES_A_FILE, "B a file")
    given_up, lost = told["waits_given_up"], told["requests_lost"]
    report.remarks.append(f"waits given up: {given_up}, requests lost: {lost}")


if __name__ == "__main__":
    main()
