"""Faults by the thousand: kills, stops, full and damaged disks, lost servers, clocks that jump.

``python benchmarks/campaign.py --faults 10000`` draws random configurations (recipe, source,
workers, ranks, caches in memory, on disk and in a pool, packages, ``stoker run``), trains with
them, and injects random faults. Every sample's bytes and label are compared with the truth, ranks
must be equally long, epochs that promise each sample once must keep it over any number of restarts
from checkpoints, nothing may hang and nothing be left behind. Prints one table, and the seed of
each run that was not clean: ``--repeat SEED`` does that one again, with what it said.

Needs Linux; what cannot be done here (no right to mount or to limit memory, no server, no C
compiler) is left out and said so. Training that a fault must end, such as the loss of a rank or a
worker, starts again from its last checkpoint, with another number of ranks and workers.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from harness import Report, parser, show

_CHECKS = ("wrong_bytes", "wrong_labels", "not_once", "hangs", "failures", "leaks")


def main() -> int:
    """Run the campaign and return the exit status: 1 if anything was not clean."""
    options = parser(__doc__)
    options.add_argument("--faults", type=int, default=10000, help="how many (default 10000)")
    options.add_argument("--seed", type=int, default=1, help="of the first run (default 1)")
    options.add_argument("--repeat", type=int, help="do the run of this seed again, verbosely")
    options.add_argument("--parallel", type=int, default=2, help="runs at a time (default 2)")
    options.add_argument("--conduct", type=Path, help=None)
    args = options.parse_args()
    if args.conduct is not None:
        return _conduct(args.conduct)
    wanted = 200 if args.smoke else args.faults
    seeds = [args.repeat] if args.repeat is not None else None
    parallel = 1 if seeds else args.parallel
    results = _Campaign(wanted, args.seed, seeds).run(parallel)
    report = _report(results)
    show(args, report)
    bad = [result for result in results if any(result[name] for name in _CHECKS)]
    for result in bad:
        print(f"\nseed {result['seed']} ({result['what']}):", *result["said"], sep="\n  ")
    return 1 if bad else 0


class _Campaign:
    """Hands seeds to processes that run them, until enough faults were injected."""

    def __init__(self, wanted: int, first: int, seeds: list[int] | None) -> None:
        self._wanted, self._next, self._seeds = wanted, first, seeds
        self._results: list[dict] = []
        self._lock = threading.Lock()

    def run(self, parallel: int) -> list[dict]:
        """Return the results of all runs."""
        threads = [threading.Thread(target=self._feed) for _ in range(parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._results

    def _seed(self) -> int | None:
        with self._lock:
            if self._seeds is not None:
                return self._seeds.pop() if self._seeds else None
            done = sum(sum(result["faults"].values()) for result in self._results)
            if done >= self._wanted:
                return None
            self._next += 1
            return self._next - 1

    def _feed(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="stoker-campaign-"))
        process = subprocess.Popen(
            [sys.executable, __file__, "--conduct", str(root)],
            env=_environment(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        clean = True
        while (seed := self._seed()) is not None:
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process that runs seed {seed} has ended")
            result = json.loads(line)
            is_bad = any(result[name] for name in _CHECKS)
            clean &= not is_bad
            with self._lock:
                self._results.append(result)
                count = sum(result["faults"].values())
                flags = {name: result[name] for name in _CHECKS if result[name]}
                told = (
                    f"seed {seed}: {result['what']}: {count} faults, {result['restarts']} restarts"
                )
                print(told, flags or "", f"{result['seconds']:.0f} s", file=sys.stderr, flush=True)
                if is_bad:
                    print(*result["said"], sep="\n  ", file=sys.stderr, flush=True)
        process.stdin.close()
        process.wait()
        if clean:
            shutil.rmtree(root, ignore_errors=True)
        else:
            print(f"logs are in {root}", file=sys.stderr)


def _environment(root: Path) -> dict[str, str]:
    """Return the environment of a process that conducts runs."""
    environment = {
        **os.environ,
        "STOKER_RUNTIME_DIR": str(root / "run"),
        "TMPDIR": str(root / "tmp"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    library, clock = root / "clock.so", root / "clock"
    source = Path(__file__).with_name("campaign_clock.c")
    compiler = shutil.which("cc")
    if compiler is not None:
        flags = ["-O1", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([compiler, *flags, str(source), "-ldl"], check=True)
        clock.write_bytes(struct.pack("d", 0.0))
        environment |= {"LD_PRELOAD": str(library), "CAMPAIGN_CLOCK": str(clock)}
    return environment


def _conduct(root: Path) -> int:
    """Do the runs whose seeds come on standard input, and print their results."""
    # Loaded once, for all that are forked.
    import torch.distributed  # noqa: F401
    from campaign_data import write_files, write_shards
    from campaign_faults import memory_group, set_clock
    from campaign_run import Run, Stage
    from campaign_servers import Wires, http_server, pool_server

    import stoker.pytorch
    import stoker.testing  # noqa: F401

    for name in ("run", "tmp"):
        (root / name).mkdir(mode=0o700)
    data = root / "data"
    write_files(data / "files")
    write_shards(data / "shards")
    pool, http = pool_server(), http_server(root / "nginx", data)
    wires = Wires(root, [server.port for server in (pool, http) if server is not None])
    clock = root / "clock"
    stage = Stage(
        root,
        data,
        pool,
        http,
        wires,
        clock if clock.exists() else None,
        _can_mount(root),
        memory_group(f"stoker-campaign-{os.getpid()}"),
    )
    for line in sys.stdin:
        began = time.monotonic()
        outcome = Run(int(line), stage).go()
        print(json.dumps({**asdict(outcome), "seconds": time.monotonic() - began}), flush=True)
        if clock.exists():
            set_clock(clock, 0.0)
    if stage.memory is not None:
        stage.memory.close()
    wires.close()
    for server in (pool, http):
        if server is not None:
            server.kill()
    return 0


def _can_mount(root: Path) -> bool:
    """Return whether a small file system can be mounted, to be filled."""
    place = root / "probe"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        return False
    subprocess.run(["umount", place], check=True)
    return True


def _report(results: list[dict]) -> Report:
    report = Report("Fault campaign")
    kinds: dict[str, list[dict]] = {}
    for result in results:
        for kind in result["faults"]:
            kinds.setdefault(kind, []).append(result)
    for kind in sorted(kinds):
        runs = kinds[kind]
        report.row(
            fault=kind,
            injected=sum(run["faults"][kind] for run in runs),
            runs=len(runs),
            **{
                f"{name.replace('_', ' ')} in them": sum(run[name] for run in runs)
                for name in _CHECKS
            },
        )
    report.row(
        fault="all",
        injected=sum(sum(run["faults"].values()) for run in results),
        runs=len(results),
        **{
            f"{name.replace('_', ' ')} in them": sum(run[name] for run in results)
            for name in _CHECKS
        },
    )
    samples, restarts = (sum(run[name] for run in results) for name in ("samples", "restarts"))
    report.remarks.append(f"{samples} samples checked, {restarts} restarts from checkpoints")
    report.remarks.append(
        "seeds: " + ", ".join(str(r["seed"]) for r in sorted(results, key=_by_seed))
    )
    if shutil.which("cc") is None:
        report.remarks.append("no C compiler here: clocks did not jump")
    return report


def _by_seed(result: dict) -> int:
    seed: int = result["seed"]
    return seed


if __name__ == "__main__":
    sys.exit(main())
