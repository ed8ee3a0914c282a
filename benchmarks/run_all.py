"""Run every benchmark, one after the other; each prints its own table.

Options are passed on: ``--json`` to all of them, ``--smoke`` to those that no test runs tiny.
``--data DIR`` (a folder of class folders, or one with those in train/ and test/; CIFAR-10 for the
published numbers) goes to those that read images. With ``--output DIR`` each table is written to a
file there, plots beside them, and existing tables are not made again. So are the runs that take
hours, which resume where they were stopped and run only with it, or tiny with ``--smoke``. With
``--publish benchmarks`` each writes its part of the pages of results too. ``--list`` runs nothing
and says how long each took when it was last published. Ends with status 1 when one of them failed;
a target that is not met is printed and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from feed_process import WARM

BENCHMARKS = (
    "arena_hits",
    "arena_insert",
    "ids_scale",
    "hit_ratio",
    "images",
    "cache_stage",
    "loader_cached",
    "stands_down",
    "scoring_cost",
    "index_memory",
    "feed",
    "formats",
    "line_rate",
    "pool",
    "tiering",
    "tiering_small",
    "shim_cost",
    "jobs",
    "many_processes",
    "group",
    "fairness",
    "operate",
    "nodes",
    "virtual_time",
    "simulate",
    "sim_vs_live",
    "curves",
    "frontier",
    "mechanisms",
    "papers",
)
HOURS = (
    "no_regret",
    "importance",
    "importance_time",
    "accuracy_of_repeats",
    "block",
    "label_noise",
    "fair_trial",
    "confirmation",
)
TESTED = (
    "cache_stage",
    "frontier",
    "mechanisms",
    "no_regret",
    "papers",
)  # tests/benchmarks runs them tiny
ON_A_DEVICE = ("accelerator",)  # by hand, where there is one; on the processor with --smoke
READ_IMAGES = ("hit_ratio", "loader_cached", "stands_down", "feed", "simulate")


def main() -> int:
    """Run them all and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that they run")
    parser.add_argument("--json", action="store_true", help="one JSON document a benchmark")
    parser.add_argument("--data", type=Path, help="images for those that read them")
    parser.add_argument("--output", type=Path, help="folder for tables, plots and trainings")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="as each of them takes it")
    parser.add_argument("--list", action="store_true", help="how long each took; runs nothing")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name}: {_took(name)}" for name in BENCHMARKS + HOURS))
        return 0
    names = BENCHMARKS + HOURS * (args.smoke or args.output is not None)
    if args.smoke:
        names = tuple(name for name in names if name not in TESTED) + ON_A_DEVICE
    failed = [name for name in names if not _done(name, args) and _timed(name, args)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _took(name: str) -> str:
    """Return the times of the runs whose results are committed, as they recorded them."""
    results = Path(__file__).parent / "results"
    found = []
    for path in sorted(results.glob("*.json")):
        run = json.loads(path.read_text())
        if f"/{name}.py" in run.get("command", ""):
            part = path.stem.removeprefix(name).removeprefix("-")
            found.append(f"{run['seconds']} s" + (f" for {part}" if part else ""))
    if name in HOURS and not any(" for " not in one for one in found):
        found.append("hours")
    return ", ".join(found) or "not recorded"


def _table(name: str, args: argparse.Namespace) -> Path:
    output: Path = args.output
    return output / f"{name}.{'json' if args.json else 'md'}"


def _done(name: str, args: argparse.Namespace) -> bool:
    return args.output is not None and _table(name, args).exists()


def _timed(name: str, args: argparse.Namespace) -> int:
    """Run one benchmark and say how long it took; return its exit status."""
    before = os.times()
    status = _run(name, args)
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    seconds = after.elapsed - before.elapsed
    print(f"{name}: {seconds:.0f} s, {used:.0f} of a processor", file=sys.stderr, flush=True)
    return status


def _run(name: str, args: argparse.Namespace) -> int:
    """Run one benchmark, its table printed or written; return its exit status."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *_options(name, args)]
    environment = os.environ | ({WARM: "1"} if args.smoke else {})
    if args.output is None:
        return subprocess.run(command, check=False, env=environment).returncode
    args.output.mkdir(parents=True, exist_ok=True)
    unfinished = _table(name, args).with_suffix(".part")
    with unfinished.open("w") as file:
        status = subprocess.run(command, check=False, stdout=file, env=environment).returncode
    if not status:
        unfinished.rename(_table(name, args))
    return status


def _options(name: str, args: argparse.Namespace) -> list[str]:
    options = ["--smoke"] * args.smoke + ["--json"] * args.json
    if name in ON_A_DEVICE:
        options += ["--device", "cpu"]
    if args.data and name in HOURS and name != "no_regret":
        options += ["--data", str(args.data)]
    elif args.data and name in READ_IMAGES:
        inside = args.data / "train"
        options += ["--data", str(inside if inside.is_dir() else args.data)]
    if args.output and name in HOURS and not args.smoke:
        options += ["--output", str(args.output / name)]
    if args.publish:
        options += ["--publish", str(args.publish)]
    if args.output and name in ("curves", "frontier"):
        options += ["--plots", str(args.output / "plots")]
    return options


if __name__ == "__main__":
    sys.exit(main())
