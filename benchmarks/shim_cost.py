"""What the preload library of ``stoker run`` costs a call when there is nothing for it to do.

A small C program calls each function through the library and, in turns, in the C library itself;
the figure is the median over the rounds of the difference within a round. Source, tier and the
file outside of both lie on one device, the worst case: a file on another device than the source is
known not to be below it. ``refused`` is a file that fits on no tier.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Report, parser, show

import stoker._core
from stoker.tiering.layout import State, create_counters
from stoker.tiering.table import Settings, Table, TierPaths

LIBRARY = Path(stoker._core.__file__).parent / "libstoker_preload.so"
SIZE = 1 << 17  # bytes of each file: as many as there are calls in a round, and more
LIMITS = {"open": 1000.0, "openat": 1000.0, "read": 50.0, "pread": 50.0}  # nanoseconds
MONTH = 30 * 24 * 3600 * 1000  # milliseconds: neither daemon nor copies grow old meanwhile


def main() -> None:
    """Parse the arguments, measure, print the report."""
    args = parser(__doc__).parse_args()
    report = Report("Cost of the preload library", args.smoke)
    rounds, calls = (3, 20) if args.smoke else (41 * args.rounds, 1000)
    with tempfile.TemporaryDirectory(prefix="shim-") as folder:
        for name, real, more in measure(Path(folder), rounds, calls):
            report.row(call=name, real_ns=real, more_ns=more)
            if ", placed" not in name and name.split(",")[0] in LIMITS:
                report.target(f"{name}: more", more, LIMITS[name.split(",")[0]], "ns")
    show(args, report)


def measure(root: Path, rounds: int, calls: int) -> list[tuple[str, float, float]]:
    """Run the C program; return each case's name, real nanoseconds, and how many more."""
    program = root / "shim_cost"
    code = Path(__file__).with_suffix(".c")
    compiler = shutil.which("cc") or shutil.which("gcc") or sys.exit("no C compiler was found")
    subprocess.run([compiler, "-O2", "-o", program, code, "-ldl"], check=True)
    source, copies = root / "source", root / "copies"
    for folder in (source, copies):
        folder.mkdir()
    outside, refused, placed = root / "outside", source / "refused", source / "placed"
    copy = copies / "placed"
    for path in (outside, refused, placed):
        path.write_bytes(bytes(SIZE))
    shutil.copy2(placed, copy)
    make_run(root, source, copies)
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY), "STOKER_TIERING": str(root)}
    command = [str(part) for part in (program, rounds, calls, outside, refused, placed, copy)]
    done = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = (line.split("\t") for line in done.stdout.splitlines())
    return [(name, float(real), float(more)) for name, real, more in rows]


def make_run(root: Path, source: Path, copies: Path) -> None:
    """Write a run's directory with one file placed, one refused, and ten thousand beside them."""
    limits = Settings(
        small_bytes=0, large_bytes=1 << 23, ahead_bytes=1 << 27, wait_ms=1, heartbeat_ms=MONTH
    )
    place = TierPaths(copies, copies, copies.stat().st_dev)
    table = Table(root / "table", [source], source.stat(), [place], limits)
    status = (source / "placed").stat()
    now = time.monotonic_ns()
    for number in range(10_000):
        name = f"train/n{number % 100:08d}/image_{number}.jpeg".encode()
        table.add(name, status, State.REFUSED, is_link=False, seen_ns=now)
    table.add(b"refused", status, State.REFUSED, is_link=False, seen_ns=now)
    inode = (copies / "placed").stat().st_ino
    table.add(b"placed", status, State.PLACED, is_link=False, seen_ns=now, copy_ino=inode)
    create_counters(root / "counters")


if __name__ == "__main__":
    main()
