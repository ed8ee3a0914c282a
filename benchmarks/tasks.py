"""Results made once each: a long benchmark can stop and resume, also several times at once."""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness


def parser(
    description: str | None,
    *,
    samples: int,
    test_samples: int,
    epochs: int,
    seeds: int,
    output: str,
) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that train for hours, and these defaults."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", type=Path, help="folder with train/ and test/ of class folders")
    result.add_argument("--samples", type=int, default=samples, help="training images, at most")
    result.add_argument("--test-samples", type=int, default=test_samples)
    result.add_argument("--epochs", type=int, default=epochs)
    result.add_argument("--seeds", type=int, default=seeds)
    result.add_argument("--batch-size", type=int, default=64)
    result.add_argument(
        "--minutes",
        "--max-minutes",
        type=float,
        default=1e9,
        help="start nothing new after these",
    )
    result.add_argument("--output", type=Path, default=Path(output))
    result.add_argument("--report", action="store_true", help="only print what is there")
    harness.add_options(result)
    return result


@dataclass(frozen=True)
class Task:
    """One result: its JSON file, what must be there first, and what makes it."""

    path: Path
    needs: tuple[Path, ...]
    run: Callable[[], dict[str, Any]]


def run_missing(tasks: Iterable[Task], minutes: float, at_a_time: int = 1) -> None:
    """Make the results that are missing and that no other process makes, until time is up.

    ``tasks`` come in an order in which none needs a later one. ``at_a_time``: in so many processes.
    """
    end = time.monotonic() + 60 * minutes
    tasks = list(tasks)
    if at_a_time > 1:
        fork = multiprocessing.get_context("fork")
        makers = [fork.Process(target=run_missing, args=(tasks, minutes)) for _ in range(at_a_time)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        if any(maker.exitcode for maker in makers):
            raise RuntimeError("a process that makes results failed: see above")
        return
    while missing := [task for task in tasks if not task.path.exists()]:
        made = 0
        for number, task in enumerate(missing, 1):
            if time.monotonic() > end:
                left = len(missing) - number + 1
                print(f"time is up: {left} results are missing", file=sys.stderr)
                return
            with _locked(task.path.with_suffix(".lock")) as is_ours:
                if is_ours and not task.path.exists() and all(p.exists() for p in task.needs):
                    made += 1
                    _make(task, f"{number}/{len(missing)}")
        if not made:
            time.sleep(5)  # what is missing is being made, or waits for what is


def _make(task: Task, number: str) -> None:
    """Make one result, whole or not at all."""
    began = time.monotonic()
    unfinished = task.path.with_suffix(".part")
    unfinished.write_text(json.dumps(task.run()))
    unfinished.rename(task.path)
    spent = time.monotonic() - began
    print(f"{number} {task.path.parent.name}/{task.path.stem}: {spent:.1f} s", file=sys.stderr)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of one result, or say that another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
