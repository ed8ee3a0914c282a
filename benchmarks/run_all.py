"""Run every benchmark, one after the other; each prints its own table.

Options are passed on: ``--smoke`` and ``--json`` to all of them. ``--data DIR`` (a folder of class
folders, CIFAR-10 for the published numbers) goes to those that read images. Ends with status 1 when
one of them failed; a target that is not met is printed and is no failure. ``importance`` and
``importance_time``, which take hours and go on where they were stopped, run only with ``--smoke``
here: start them by themselves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "arena_hits",
    "arena_insert",
    "ids_scale",
    "hit_ratio",
    "loader_cached",
    "scoring_cost",
    "index_memory",
    "feed",
    "pool",
    "tiering",
    "tiering_small",
    "shim_cost",
    "jobs",
    "nodes",
    "virtual_time",
    "simulate",
    "curves",
)
HOURS = ("importance", "importance_time", "accuracy_of_repeats")
READ_IMAGES = ("hit_ratio", "loader_cached", "feed", "simulate")


def main() -> int:
    """Run them all and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that they run")
    parser.add_argument("--json", action="store_true", help="one JSON document a benchmark")
    parser.add_argument("--data", help="folder of class folders for those that read images")
    args = parser.parse_args()
    failed = []
    for name in BENCHMARKS + HOURS * args.smoke:
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        command += ["--smoke"] * args.smoke + ["--json"] * args.json
        if args.data and name in READ_IMAGES:
            command += ["--data", args.data]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
