"""Unmodified programs under `stoker run`, on a FUSE file system that counts what it is asked for.

Three epochs over data of which 56 % fits, as in MONARCH's evaluation: PyTorch and TensorFlow, files
of 100-150 KB and shards of 100 MB (TFRecord for TensorFlow). Without Stoker each epoch reads all of
D bytes; whatever is placed is read once. The least is therefore (f + 3 (1 - f)) D. Bytes and
operations are exact; times depend on the machine, so the time is also given as a multiple of what
the counted bytes cost plus what the program takes on a local copy. A byte costs what the storage's
bandwidth makes of it; where the program alone does not keep the storage busy (a few reads at a
time, each with its latency), it costs more; the multiple is given by the program's own pace too.

With room for everything, the program under Stoker is compared with the program that is given the
folder of copies, in interleaved rounds: both read the same files, in the same state of the page
cache, and neither is charged for the other's turn of the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from feed_servers import Unavailable, slow_folder
from harness import Report, interleave, paired_ratio, parser, show
from slow_counts import Asked, Counts

EPOCHS, SHARE = 3, 0.56
MB_PER_S, OPEN_MS, READ_MS = 100, 1, 1
# Reads under way at once. Unlike a worker process, one more costs tf.data next to nothing, and with
# four the program alone leaves a quarter of the storage's bandwidth unused.
WORKERS = {"pytorch": 4, "tensorflow": 16}
PAPER = {"pytorch": 0.37, "tensorflow": 0.28}
_SMOKE = ("pytorch, files", "tensorflow, shards")
_YOUNG = 2.5  # seconds in which files are not copied, since they may still change
_EXAMPLES = Path(__file__).parents[1] / "examples"
_LINE = re.compile(r"epoch \d+: (\d+) samples, sum (\d+), ([0-9.]+) s")


@dataclass(frozen=True)
class Case:
    """A program and the data it reads."""

    framework: str
    layout: str
    program: tuple[str, ...]
    folder: Path
    """Where the data really is."""

    def __str__(self) -> str:
        return f"{self.framework}, {self.layout}"

    @property
    def bytes(self) -> int:
        """D."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def fitting_share(self) -> float:
        """f: what of SHARE whole files of this size fill; shards are all of one size."""
        size = max(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return SHARE * self.bytes // size * size / self.bytes

    def command(self, folder: Path) -> list[str]:
        """Return the program's command line for the data at ``folder``."""
        script = _EXAMPLES / f"tiering_{self.framework}.py"
        given = [f"--epochs={EPOCHS}", f"--workers={WORKERS[self.framework]}", *self.program]
        return [sys.executable, str(script), str(folder), *given]


@dataclass(frozen=True)
class Run:
    """What three epochs took."""

    seconds: list[float]
    asked: list[Asked]
    """Of the storage, in each epoch."""
    sums: set[tuple[str, str]]
    """Samples and sum that each epoch printed."""

    @property
    def bytes(self) -> int:
        """Bytes read from the storage."""
        return sum(asked.bytes for asked in self.asked)

    @property
    def operations(self) -> int:
        """Opens and reads of the storage."""
        return sum(asked.operations for asked in self.asked)


def main() -> None:
    """Run all cases and print the table."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, default=1_100, help="size of each data set in MB")
    options.add_argument("--only", default="", help="a case, as in 'pytorch, files'")
    options.add_argument("--folder", type=Path, help="where data and tier lie (default: TMPDIR)")
    args = options.parse_args()
    report = Report("Programs under stoker run", args.smoke)
    report.remarks.append(
        f"storage: {OPEN_MS} ms an open, {READ_MS} ms a read, {MB_PER_S} MB/s; "
        f"{EPOCHS} epochs, f = {SHARE:.0%}; operations are opens and reads as FUSE asks for them"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=args.folder) as folder:
            for case in cases(Path(folder), args):
                measure(report, case, args)
                shutil.rmtree(case.folder)
    except Unavailable as error:
        report.remarks.append(str(error))
    show(args, report)


def cases(folder: Path, args: argparse.Namespace) -> Iterator[Case]:
    """Write one data set after the other and yield what reads it."""
    total = 12_000_000 if args.smoke else args.mb * 1_000_000
    shard = 2_000_000 if args.smoke else 100_000_000
    ordered = ("--in-order", "--record=1048576")
    for case, write in (
        (Case("pytorch", "files", (), folder / "pf"), lambda f: write_files(f, total)),
        (
            Case("pytorch", "shards", ordered, folder / "ps"),
            lambda f: write_shards(f, total, shard),
        ),
        (Case("tensorflow", "files", (), folder / "tf"), lambda f: write_files(f, total)),
        (Case("tensorflow", "shards", (), folder / "ts"), lambda f: write_records(f, total, shard)),
    ):
        if args.only not in str(case) or (args.smoke and str(case) not in _SMOKE):
            continue
        if importlib.util.find_spec(case.framework.replace("pytorch", "torch")) is None:
            print(
                f"no {case.framework} here: pip install 'stoker[torch,tiering-tests]'",
                file=sys.stderr,
            )
            continue
        write(case.folder)
        yield case


def measure(report: Report, case: Case, args: argparse.Namespace) -> None:
    """Run a case without and with Stoker, with room for a part and for everything."""
    counts_file = case.folder.parent / "counts"
    counts = Counts(counts_file)
    local = run(case.command(case.folder), counts)
    with slow_folder(case.folder, OPEN_MS, READ_MS, MB_PER_S, 0, counts_file) as far:
        plain = run(case.command(far), counts)
        row(report, case, "plain", plain)
        with tier(case, SHARE) as (prefix, _):
            tiered = run(prefix(far) + case.command(far), counts)
        row(report, case, "stoker run", tiered)
        assert local.sums == plain.sums == tiered.sums, "the programs saw other bytes"
        compare(report, case, local, plain, tiered)
        if not args.smoke:
            everything_fits(report, case, far, counts, local, args.rounds)


def compare(report: Report, case: Case, local: Run, plain: Run, tiered: Run) -> None:
    """Hold bytes, operations and time against the goals."""
    share = case.fitting_share
    least = (share + EPOCHS * (1 - share)) * case.bytes
    report.target(f"{case}: source bytes to the least", tiered.bytes / least, 1.05)
    for epoch in (1, 2):
        later = tiered.asked[epoch].bytes / ((1 - share) * case.bytes)
        report.target(f"{case}: bytes of epoch {epoch + 1} to (1 - f) D", later, 1.05)
    if case.layout == "shards":
        fewer = 1 - tiered.operations / plain.operations
        report.target(f"{case}: fewer source operations", fewer, 0.5, at_least=True)
    compute = sum(local.seconds)
    pace = plain.bytes / (sum(plain.seconds) - compute)
    for by, rate in (("", MB_PER_S * 1e6), (" at the program's pace", pace)):
        ratio = sum(tiered.seconds) / (tiered.bytes / rate + compute)
        report.target(f"{case}: time to bytes and compute{by}", ratio, 1.15)
    alone = sum(plain.seconds) / (plain.bytes / (MB_PER_S * 1e6) + compute)
    saved = 1 - sum(tiered.seconds) / sum(plain.seconds)
    if not report.smoke:
        report.remarks.append(
            f"{case}: {saved:.0%} less time (MONARCH on its cluster: {PAPER[case.framework]:.0%}); "
            f"without Stoker the time is {alone:.3g} of bytes and compute"
        )


def everything_fits(
    report: Report, case: Case, far: Path, counts: Counts, local: Run, rounds: int
) -> None:
    """Epochs two and three read copies only: against a program that is given their folder."""

    def later_epochs(command: list[str]) -> float:
        found = run(command, counts)
        assert found.sums == local.sums, f"not all is copied: {local.sums} {found.sums}"
        return sum(found.seconds[1:])

    with tier(case, 1.1) as (prefix, copies):
        under = prefix(far) + case.command(far)
        fitting = run(under, counts)
        row(report, case, "stoker run, all fits", fitting)
        assert fitting.sums == local.sums, "the programs saw other bytes"
        took = interleave(
            {
                "copies": lambda: later_epochs(case.command(copies)),
                "stoker run": lambda: later_epochs(under),
            },
            rounds,
            warm_up=False,  # the run before has read all copies twice
        )
    ratio = paired_ratio(took["stoker run"], took["copies"])
    report.target(f"{case}: all fits, epochs 2 and 3 to the local copy", ratio, 1.05)
    within = [a / b for a, b in zip(took["stoker run"], took["copies"], strict=True)]
    report.remarks.append(
        f"{case}: all fits, epochs 2 and 3 of the run that copied: "
        f"{sum(fitting.seconds[1:]):.2f} s; on the copies {median(took['copies']):.2f} s; "
        f"the ratio of the {rounds} rounds lies between {min(within):.3g} and {max(within):.3g}"
    )


def row(report: Report, case: Case, who: str, found: Run) -> None:
    """Add a row of the table, and say it at once: a case takes minutes."""
    asked = [epoch.bytes for epoch in found.asked]
    print(f"{case}, {who}: {found.seconds} s, {asked} bytes", file=sys.stderr, flush=True)
    report.row(
        case=str(case),
        who=who,
        seconds=sum(found.seconds),
        by_epoch=" ".join(f"{s:.1f}" for s in found.seconds),
        bytes_to_D=found.bytes / case.bytes,
        by_epoch_to_D=" ".join(f"{a.bytes / case.bytes:.3f}" for a in found.asked),
        operations=found.operations,
    )


@contextmanager
def tier(case: Case, share: float):
    """Yield what stands before a command, given the source, and where the copies come to lie."""
    with tempfile.TemporaryDirectory(prefix="stoker-tier-", dir=case.folder.parent) as folder:
        quota = int(share * case.bytes)

        def prefix(source: Path) -> list[str]:
            start = [sys.executable, "-c", "from stoker.cli import main; main()", "run", "--quiet"]
            return [*start, f"--source={source}", f"--tier={folder}:{quota}", "--"]

        yield prefix, Path(folder) / "copies"


def run(command: list[str], counts: Counts) -> Run:
    """Run a program and note at the end of each epoch what the storage was asked for."""
    seconds, asked, sums = [], [], set()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        before = counts.asked()
        assert process.stdout
        for line in process.stdout:
            if match := _LINE.match(line):
                time.sleep(0.2)  # what was read ahead for no program counts too
                now = counts.asked()
                asked.append(now.since(before))
                before = now
                sums.add((match[1], match[2]))
                seconds.append(float(match[3]))
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{command} failed: {errors.read()[-2000:]}")
    return Run(seconds, asked, sums)


def write_files(folder: Path, total: int) -> None:
    """Write files of 100 to 150 KB, ``total`` bytes in all."""
    rng = np.random.default_rng(0)
    written = 0
    while written < total:
        size = int(rng.integers(100_000, 150_001))
        path = folder / f"{written // 100_000_000:03d}" / f"{written:012d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(size))
        written += size
    time.sleep(_YOUNG)


def write_shards(folder: Path, total: int, shard: int) -> None:
    """Write shards of random bytes."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(total // shard):
        (folder / f"{number:03d}.bin").write_bytes(rng.bytes(shard))
    time.sleep(_YOUNG)


def write_records(folder: Path, total: int, shard: int) -> None:
    """Write shards in TensorFlow's format, with samples of 100 to 150 KB."""
    program = f"""
import json, sys
import numpy as np
import tensorflow as tf
rng = np.random.default_rng(0)
for number in range({total // shard}):
    with tf.io.TFRecordWriter(sys.argv[1] + "/%03d.tfrecord" % number) as out:
        left = {shard}
        while left > 0:
            size = int(rng.integers(100_000, 150_001))
            out.write(rng.bytes(size))
            left -= size
print(json.dumps("done"))
"""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == "done"
    time.sleep(_YOUNG)


if __name__ == "__main__":
    main()
