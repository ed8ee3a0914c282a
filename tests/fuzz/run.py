"""Fuzzes parsers: ``PYTHONPATH=tests python -m fuzz.run --seconds 60 [TARGET...]``.

Each target runs in a process of its own, ``--jobs`` at a time. What is found stays
in ``tests/fuzz/corpus/TARGET``, which the tests try too; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from fuzz.harness import CORPUS, check, damaged
from fuzz.targets import TARGETS


def main() -> int:
    """Fuzz the targets that are named, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; repeats it")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(TARGETS)}")
    first = time.time_ns() % (1 << 31) if given.seed is None else given.seed
    if given.here:
        return _fuzz(names[0], given.seconds, first)

    def run(name: str) -> int:
        options = ["--seconds", str(given.seconds), "--seed", str(first), "--here"]
        return subprocess.run([sys.executable, "-m", "fuzz.run", name, *options]).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        return max(map(abs, pool.map(run, names)))


def _fuzz(name: str, seconds: float, seed: int) -> int:
    """Try inputs of one target until something is found or the time is over."""
    warnings.simplefilter("error")
    logging.disable()
    deadline, tried = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="stoker-fuzz-") as folder:
        target = TARGETS[name](Path(folder))
        make = damaged(name, target)
        try:
            while time.monotonic() < deadline:
                data = make(Random(seed + tried))
                check(target, data)
                tried += 1
        except BaseException:
            traceback.print_exc()
            print(f"{name}: found {_keep(name, data)} after {tried:,} inputs", flush=True)
            return 1
        finally:
            target.close()
    print(f"{name}: {tried:,} inputs in {seconds:.0f} s, nothing found", flush=True)
    return 0


def _keep(name: str, data: bytes) -> Path:
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    sys.exit(main())
