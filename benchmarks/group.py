"""Two users with two jobs each at a cache of the node's service, against one user with four.

All read one folder of files (20 KB each), and in each case there is as much memory for samples. In
each round, in alternating order:

- two users: the service shares the folder (``--share``) with a group; each user's jobs have a small
  cache of their own above that;
- one user: the same service, and all four jobs are one user's;
- two users, all shared: the service has the memory of the small caches too, so that nothing is
  read ahead;
- one user, all shared: likewise;
- alone: one user's four jobs share a cache of their own, no service.

Jobs tell the service what they need next, as far as the cache does not hold the whole folder. It
keeps all of it, or two fifths (half, where all is shared). Bytes of the source are those that jobs
count, and those that the service read in vain: what it read for a job that then read itself.
Processor time is that of all jobs, their workers, processes that read ahead and the service
together; the storage is this machine's page cache, and accelerators sleep. Needs root, to be
several users, and a Python that other users may run.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from harness import Report, paired_interval, paired_ratio, parser, show

import stoker
from stoker.jobs.protocol import ask
from stoker.source.image_folder import ImageFolderSource

GROUP, SERVICE, USERS = 65534, 54320, (54321, 54322)
OWN = 0.10  # of the folder: what caches of the users' own have together
SIZE, BATCH, CLASSES = 20_000, 32, 10
RATE = 4_000  # samples a second that a model computes


@dataclass(frozen=True)
class Job:
    """What one job does."""

    root: str
    pool: str | None
    memory: float
    seed: int
    epochs: int


def main() -> None:
    """Parse the arguments, run the rounds, print a report."""
    if sys.argv[1:2] == ["--job"]:
        train(Job(**json.loads(sys.argv[2])))
        return
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    args = arguments.parse_args()
    report = Report("Users: two of a group at one cache", args.smoke)
    if why := why_not():
        report.remarks.append(f"left out: {why}")
        show(args, report)
        return
    count, epochs = (100, 2) if args.smoke else (2_000, 4)
    with tempfile.TemporaryDirectory(prefix="stoker-group-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_files(folder / "data", count)
        for share in (1.0,) if args.smoke else (1.0, 0.4):
            compare(report, folder, share, epochs, 1 if args.smoke else args.rounds)
    show(args, report)


def why_not() -> str:
    """Return why this machine cannot run it; "" if it can."""
    if os.geteuid() != 0:
        return "only root can be several users"
    try:
        subprocess.run([sys.executable, "-c", ""], user=USERS[0], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"other users cannot run this Python: {error}"
    return ""


def compare(report: Report, folder: Path, share: float, epochs: int, rounds: int) -> None:
    """Run all cases in each round; add a row for each, and the ratios."""
    names = ["two users", "one user", "two users, all shared", "one user, all shared", "alone"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            found[name].append(run(folder, name, share, epochs))
            print(f"{share:.0%}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    for name, figures in found.items():
        medians = {key: float(np.median([each[key] for each in figures])) for key in figures[0]}
        report.row(case=name, kept=f"{share:.0%}", **medians)
    for case, other in (
        ("two users", "one user"),
        ("two users", "alone"),
        ("two users, all shared", "one user, all shared"),
        ("two users, all shared", "alone"),
    ):
        for key in ("source_MB", "cpu_s"):
            ours, theirs = ([each[key] for each in found[name]] for name in (case, other))
            low, high = paired_interval(ours, theirs)
            text = f"{key}, {share:.0%} kept, {case} / {other} ({low:.3f} to {high:.3f})"
            report.target(text, paired_ratio(ours, theirs), 1.05)


def run(folder: Path, case: str, share: float, epochs: int) -> dict[str, float]:
    """Run four jobs at once; return what they and the service took."""
    users = USERS if case.startswith("two users") else USERS[:1]
    own = OWN / len(users) if case != "alone" else min(1.0, share + OWN)
    if "all shared" in case:
        share, own = min(1.0, share + OWN), 0.0
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        place.chmod(0o755)
        homes = {user: home_of(place, user) for user in (*users, SERVICE)}
        pool = None
        if case != "alone":
            at = homes[SERVICE] / "s.sock"
            stack.enter_context(serving(folder / "data", at, share, homes))
            pool = f"unix:{at}"
        jobs = [Job(str(folder / "data"), pool, own, seed, epochs) for seed in range(4)]
        running = [
            stack.enter_context(
                started(["--job", json.dumps(asdict(job))], users[number % len(users)], homes)
            )
            for number, job in enumerate(jobs)
        ]
        for each in running:
            hear(each)
        before = seconds_of(homes)
        for each in running:
            say(each, "go")
        told = [json.loads(hear(each)) for each in running]
        cpu = seconds_of(homes) - before
        say(running[0], "count")
        vain = json.loads(hear(running[0])) - sum(each["for_it"] for each in told)
        for each in running:
            say(each, "end")
    return {
        "source_MB": (sum(each["source_bytes"] for each in told) + vain * SIZE) / 1e6,
        "in_vain": vain,
        "hits": sum(each["hits"] for each in told) / sum(each["accesses"] for each in told),
        "cpu_s": cpu,
        "all_s": max(each["seconds"] for each in told),
    }


def train(job: Job) -> None:
    """Be one job: iterate, and sleep as long as its model would compute."""
    os.environ["STOKER_RUNTIME_DIR"] = str(Path.home() / "run")  # the user's, not the harness's
    data = stoker.SampleDataset(ImageFolderSource(job.root))
    cache = stoker.Cache(f"{job.memory:.2%}", pool=job.pool, stands_aside=False)
    with stoker.Loader(
        data,
        BATCH,
        num_workers=1,
        collate_fn=len,
        cache=cache,
        seed=job.seed,
        epochs=job.epochs,
        persistent_workers=True,
    ) as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        free = begin = time.monotonic()
        for _ in range(job.epochs):
            for size in loader:
                free = max(free, time.monotonic()) + size / RATE
                time.sleep(max(0.0, free - time.monotonic()))
        seconds, stats = time.monotonic() - begin, loader.stats
        facts = {
            "source_bytes": stats.bytes_from_source,
            "for_it": 0 if job.pool is None else read_by_service(loader),
            "hits": stats.hits,
            "accesses": stats.accesses,
            "seconds": seconds,
        }
        print(json.dumps(facts), flush=True)
        if sys.stdin.readline() == "count\n":
            print(0 if job.pool is None else read_for_all(job.pool), flush=True)
            sys.stdin.readline()


def read_by_service(loader: stoker.Loader) -> int:
    """Return how many samples a job found that the service read for it."""
    cached = loader._session.cached
    assert cached is not None
    return int(cached.store.stats()["pool"]["pool_read"])


def read_for_all(pool: str) -> int:
    """Return how many samples the service read."""
    (cache,) = ask("list", Path(pool.removeprefix("unix:")))["shared"]
    return sum(user["read"] for user in cache["users"].values())


def make_files(root: Path, count: int) -> None:
    """Make class folders of so many files."""
    rng = np.random.default_rng(0)
    for number in range(count):
        folder = root / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06}.jpg").write_bytes(rng.bytes(SIZE))


def home_of(place: Path, user: int) -> Path:
    """Return a folder of the user's own, where others may pass."""
    home = place / str(user)
    for folder, mode in ((home, 0o755), (home / "run", 0o700)):
        folder.mkdir()
        folder.chmod(mode)
        os.chown(folder, user, user)
    return home


@contextlib.contextmanager
def serving(data: Path, at: Path, share: float, homes: dict[int, Path]) -> Iterator[None]:
    """Have the service share a folder, once it has listed it."""
    group = grp.getgrgid(GROUP).gr_name
    shares = ["--socket", str(at), "--group", group, "--share", f"{data}={share:.0%}"]
    code = "from stoker.cli.root import root; root()"
    with started(["-c", code, "serve", *shares], SERVICE, homes) as service:
        assert service.stderr is not None
        while "are shared" not in (line := service.stderr.readline()):
            if not line:
                raise SystemExit("the service did not begin: can other users run this Python?")
        yield
        service.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def started(
    arguments: list[str], user: int, homes: dict[int, Path]
) -> Iterator[subprocess.Popen[str]]:
    """Start Python as a user in the group; it has ended at the end."""
    home = homes[user]
    named = {"HOME": home, "XDG_CACHE_HOME": home, "STOKER_RUNTIME_DIR": home / "run"}
    program = [] if arguments[0] == "-c" else [__file__]
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        user=user,
        group=user,
        extra_groups=[GROUP],
        cwd=home,
        env={**os.environ, **{name: str(path) for name, path in named.items()}}
        | {"STOKER_TRUST": str(SERVICE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if program == [] else None,
        text=True,
    )
    try:
        yield process
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()


def hear(process: subprocess.Popen[str]) -> str:
    """Return the next line that a job tells."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a job failed")
    return line


def say(process: subprocess.Popen[str], word: str) -> None:
    """Tell a job to continue."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def seconds_of(users: Iterable[int]) -> float:
    """Return the processor seconds of all processes of these users that are there."""
    ticks, chosen = 0, set(users)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid in chosen:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
