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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Of its own, so that no job that happens to read the same data shares the cache being measured.
os.environ["STOKER_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="stoker-bench-")
atexit.register(shutil.rmtree, os.environ["STOKER_RUNTIME_DIR"], True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have: --rounds, --smoke, --json."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    result.add_argument(
        "--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    result.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return result


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

    def show(self, as_json: bool) -> None:
        """Print the report on standard output."""
        print(self.to_json() if as_json else self.to_text(), flush=True)

    def to_json(self) -> str:
        """Return the report, the machine and the command as JSON."""
        targets = [asdict(t) | {"met": t.met} for t in self.targets]
        return json.dumps(
            {
                "title": self.title,
                "command": command(),
                "machine": machine(),
                "rows": self.rows,
                "targets": targets,
                "remarks": self.remarks,
            },
            indent=1,
        )

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
    """Return the command line of this run, with paths as the user gave them."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


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
