"""What every benchmark here shares: interleaved rounds, paired ratios, one table, targets, JSON.

Machines drift (turbo, neighbours, page cache), so contestants never run one after the other: each
round runs all of them, in an order that reverses every round, and a ratio is the median over the
rounds of the ratio *within* a round. Absolute times are medians and belong to one machine; quote
the ratios.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pages

# Of its own, so that no job that happens to read the same data shares the cache being measured.
os.environ["STOKER_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="stoker-bench-")
atexit.register(shutil.rmtree, os.environ["STOKER_RUNTIME_DIR"], True)
_shown = time.monotonic()
"""When this program began, or last showed reports."""


@contextmanager
def own_runtime() -> Iterator[None]:
    """Have another runtime folder meanwhile, so that no cache of an earlier training is joined."""
    before = os.environ["STOKER_RUNTIME_DIR"]
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as own:
        os.environ["STOKER_RUNTIME_DIR"] = own
        try:
            yield
        finally:
            os.environ["STOKER_RUNTIME_DIR"] = before


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have, and --rounds."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    add_options(result)
    return result


def add_options(result: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have: --smoke, --json, --publish."""
    result.add_argument(
        "--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    result.add_argument("--json", action="store_true", help="print JSON instead of the table")
    result.add_argument(
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="write tables and their JSON into FOLDER/results; benchmarks is the folder of ours",
    )


def show(
    args: argparse.Namespace,
    *reports: Report,
    part: str = "",
    runs: Sequence[dict[str, Any]] = (),
    seconds: float | None = None,
) -> None:
    """Print reports as ``args`` say, and publish them if they do.

    A program that does so several times names the ``part`` that these are; each part has a file
    of JSON and a place on its page; ``runs``, of which the tables are made, are kept in that file.
    ``seconds`` is how long it took, if not since the last call.
    What a smoke test finds is not published.
    """
    global _shown
    print_all(reports, args.json)
    if args.publish is not None and not args.smoke:
        program = Path(sys.argv[0]).stem
        document = {
            "command": command(),
            "machine": machine(),
            "recorded": _commit(),
            "seconds": round(time.monotonic() - _shown if seconds is None else seconds),
            "reports": [report.to_dict() for report in reports if report.rows],
        }
        document |= {"runs": list(runs)} if runs else {}
        name, results = f"{program}-{part}" if part else program, args.publish / "results"
        pages.dump(document, results / f"{name}.json")
        pages.put(results, program, name, text_of(document))
    _shown = time.monotonic()


def print_all(reports: Sequence[Report], as_json: bool) -> None:
    """Print reports on standard output."""
    if not as_json:
        print("\n".join(report.to_text() for report in reports), flush=True)
        return
    told = [report.to_dict() | {"command": command(), "machine": machine()} for report in reports]
    print(
        json.dumps(told[0] if len(told) == 1 else told, indent=1, default=pages.plain), flush=True
    )


def text_of(document: dict[str, Any]) -> str:
    """Return the tables of what :func:`show` wrote as JSON."""
    origin = "`{command}` on {machine}, recorded in {recorded}."
    return "\n".join(
        Report.from_dict(report, origin.format(**document)).to_text()
        for report in document["reports"]
    )


def _commit() -> str:
    """Return the commit that is checked out, and its date."""
    told = ["git", "log", "-1", "--format=%h (%cs)", "--abbrev=7"]
    folder = Path(__file__).parent
    return subprocess.run(told, cwd=folder, capture_output=True, text=True).stdout.strip()


def interleave(
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Run every contestant once a round, in alternating order; return its figures by name.

    A contestant returns its own figure (seconds per sample, say), so that its set-up is not timed.
    One round before the first is thrown away, unless ``warm_up`` is false.
    """
    results: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(0 if warm_up else 1, rounds + 1):
        order = list(contestants) if number % 2 else list(reversed(contestants))
        for name in order:
            figure = contestants[name]()
            if number:
                results[name].append(figure)
    return results


def paired_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median over rounds of ``of / to`` within the round."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def paired_interval(of: Sequence[float], to: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval, over rounds, of :func:`paired_ratio`."""
    ratios = np.divide(of, to)
    rounds = np.random.default_rng(0).integers(0, len(ratios), (10_000, len(ratios)))
    low, high = np.quantile(np.median(ratios[rounds], axis=1), (0.025, 0.975))
    return float(low), float(high)


@dataclass
class Target:
    """One number that the project set itself, and what came out."""

    name: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        """True when the measured value is on the right side of the limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign, verdict = ("≥" if self.at_least else "≤"), ("met" if self.met else "NOT met")
        return (
            f"{self.name}: {self.measured:.3g} {self.unit}(target {sign} {self.limit:g}): {verdict}"
        )


@dataclass
class Report:
    """Rows of a table, the targets they answer to, and remarks such as a peer left out.

    With ``smoke`` the targets are left out: a run that small measures nothing.
    """

    title: str
    smoke: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    origin: str = ""
    """What is told of where figures come from; by default the command and the machine of now."""

    def row(self, **cells: Any) -> None:
        """Add a row; floats are shown with three digits."""
        self.rows.append(cells)

    def target(
        self, name: str, measured: float, limit: float, unit: str = "", at_least: bool = False
    ) -> None:
        """Add a target: ``measured`` must stay below ``limit``, or above it with ``at_least``."""
        if self.smoke:
            return
        self.targets.append(Target(name, measured, limit, f"{unit} " if unit else "", at_least))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of JSON, without its origin."""
        return {
            "title": self.title,
            "rows": self.rows,
            "targets": [asdict(target) | {"met": target.met} for target in self.targets],
            "remarks": self.remarks,
        }

    @classmethod
    def from_dict(cls, told: dict[str, Any], origin: str = "") -> Report:
        """Return the report that :meth:`to_dict` told."""
        targets = [dict(target) for target in told["targets"]]
        for target in targets:
            del target["met"]  # follows from the others
        made = [Target(**target) for target in targets]
        return cls(told["title"], False, told["rows"], made, told["remarks"], origin)

    def to_text(self) -> str:
        """Return the report as a table in Markdown, ready for a page of results/."""
        origin = self.origin or f"`{command()}` on {machine()}"
        lines = [f"### {self.title}", "", origin, ""]
        if self.rows:
            names = list(dict.fromkeys(name for row in self.rows for name in row))
            cells = [names] + [[_cell(row.get(name)) for name in names] for row in self.rows]
            widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
            cells.insert(1, ["-" * width for width in widths])
            lines += [
                f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |"
                for row in cells
            ]
            lines.append("")
        lines += [f"- {target}" for target in self.targets]
        lines += [f"- {remark}" for remark in self.remarks]
        return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def command() -> str:
    """Return the command line of this run, with paths as the user gave them.

    Where its tables are published is left out.
    """
    words = sys.argv[1:]
    if "--publish" in words:
        at = words.index("--publish")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def machine() -> str:
    """Return the processor, its count of cores, and the Python version in one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def private_bytes(pid: int | None) -> int:
    """Return the bytes of memory that belong to one process alone.

    Those are the Private_* pages of its private mappings. A page of a shared mapping is "private"
    for the kernel as long as only one process has touched it, and is not counted here.
    """
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            counts = values[0].endswith("p")  # the permissions of the next mapping
        elif counts and name.startswith("Private_"):
            total += int(values[0]) * 1024
    return total
