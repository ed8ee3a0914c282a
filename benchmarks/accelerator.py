"""On an accelerator: training, the fetch engine and the image path, for a machine with many cores.

Parts (``--part``, several allowed; all by default):

- train: ResNet-50 and ResNet-18 in bfloat16 and channels_last memory, batches of 256, on JPEGs of
  110 KB: from local files, and from a web server of this machine behind a line of ``--mb-per-s``.
  Stoker's Loader with ``pin_memory`` a device and a cache of 20 %, against torch's DataLoader with
  the same decoder (and obstore for HTTP), and one batch that lies on the device. Images a second in
  the first epoch and in later ones, the share of the time in which batches were waited for, and
  processor time. All of a network run in one process, which forks their workers.
- fetch: objects of 110 KB a second from the same server, unthrottled, with 1 to 16 fetchers and
  eight workers, and what one bare obstore client and eight of them get: the server's limit.
- wait: the same, from a storage that only waits and holds up to 16 requests of a process.
- images: ``Train(224)`` from JPEGs in memory, with 1 to 16 threads and processes, by the clock.

With ``--output DIR`` the results are written there after each part: accelerator.json, and
accelerator.md, a section for a page of results, headed with the machine's name. On a machine with
an H200 and 16 cores all of it takes some seven minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerator_training import CONTESTANTS, Job, Runs, compared
from feed_process import Running, run_alone
from feed_servers import Unavailable, answers, free_port, run_until_end, slow_line, web_server
from feed_waiting import Waiting
from harness import Report, interleave, machine, paired_ratio, parser, show
from line_rate import Web, bare
from line_rate import through_stoker as fetched_by
from no_regret import jpeg
from no_regret_loaders import Task
from resnet import STAGES

from stoker.images import Canvas, Train

PARTS = ("images", "wait", "fetch", "train")
SIZE, BATCH, BYTES, DIFFERENT = 224, 256, 110_000, 20
_EPOCHS = 4  # of fetching; those after the first count
_AT_A_TIME = 16  # images that a thread takes
_COLLATING = 8  # workers that take what is fetched: one would be the limit
_CLIENTS = 8  # bare ones that show the limit of the server


def main() -> None:
    """Parse the arguments, run the parts, print and write the reports."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--depth", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    arguments.add_argument("--device", default="cuda", help="cpu with --smoke only (default cuda)")
    arguments.add_argument("--mb-per-s", type=float, default=250, help="of the line (default 250)")
    arguments.add_argument("--images", type=int, default=6_400, help="in an epoch")
    arguments.add_argument("--output", type=Path, help="folder for accelerator.json and .md")
    arguments.set_defaults(rounds=3)
    args = arguments.parse_args()
    if args.device == "cpu" and not args.smoke:
        arguments.error("--device cpu measures nothing: it goes with --smoke")
    if args.device != "cpu" and not torch.cuda.is_available():
        arguments.error("torch finds no CUDA device: --smoke --device cpu shows that it runs")
    if args.smoke:
        args.rounds, args.images, args.depth = 1, 160, [18]
    reports: list[Report] = []
    with _served(2 * args.images) as web:
        for part in args.part:
            reports.append(_PARTS[part](args, web))
            if args.output is not None:
                _write(args.output, args.device, reports)
    show(args, *reports)


@dataclass(frozen=True)
class Served(Web):
    """Images on a web server of this machine, and the folder that they lie in."""

    folder: Path


@contextlib.contextmanager
def _served(number: int) -> Iterator[Served]:
    """Serve so many images."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-served-")))
        folder.chmod(0o755)  # nginx's workers are another user's
        images = [jpeg(BYTES, seed) for seed in range(min(DIFFERENT, number))]
        names = tuple(f"{index:06d}.jpg" for index in range(number))
        for index, name in enumerate(names):
            (folder / name).write_bytes(images[index % len(images)])
        workers = max(1, cores() // 4)
        try:
            port = stack.enter_context(web_server(folder, workers))
        except Unavailable:
            port = free_port()
            program = Path(__file__).with_name("file_server.py")
            command = [sys.executable, str(program), str(port), str(folder), str(workers)]
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run_until_end(stack, command, logs, lambda: answers(port))
        yield Served(f"http://127.0.0.1:{port}", names, folder)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def counts(smoke: bool) -> list[int]:
    """Return 1, 2, 4 ... up to the cores and 16."""
    return [1, 2] if smoke else [n for n in (1, 2, 4, 8, 16) if n == 1 or n <= cores()]


def train(args: Any, web: Served) -> Report:
    """Train both networks from both storages."""
    report = Report("Training on an accelerator", args.smoke)
    with contextlib.ExitStack() as stack:
        port = int(web.url.rpartition(":")[2])
        far = stack.enter_context(slow_line(port, 1, args.mb_per_s))
        places = {f"HTTP, {args.mb_per_s:g} MB/s": f"http://127.0.0.1:{far}"}
        if not args.smoke:
            places["files"] = str(web.folder)
        for depth in args.depth:
            jobs = {name: _job(args, web, place, depth) for name, place in places.items()}
            found = run_alone(compared, jobs, args.rounds)["runs"]
            for name, runs in found.items():
                _add(report, f"ResNet-{depth}", name, runs)
    return report


def _job(args: Any, web: Served, place: str, depth: int) -> Job:
    workers = 1 if args.smoke else max(1, cores() - 2)
    task = Task(place, web.names[: args.images], BATCH, workers, decodes=True, epochs=2)
    job = Job(task, depth, 64, SIZE, args.device)
    if not args.smoke:
        return job
    return replace(job, task=replace(task, batch_size=16), width=4, size=32)


def _add(report: Report, network: str, storage: str, runs: Runs) -> None:
    first = {who: [run["image_s"][0] for run in runs[who]] for who in CONTESTANTS}
    later = {who: [run["image_s"][1] for run in runs[who]] for who in CONTESTANTS}
    for who, found in runs.items():
        report.row(
            network=network,
            storage=storage,
            loader=who,
            images_per_s_first=1 / float(np.median(first[who])),
            images_per_s=1 / float(np.median(later[who])),
            speed_to_torch_first=paired_ratio(first["torch"], first[who]),
            speed_to_torch=paired_ratio(later["torch"], later[who]),
            of_the_device=paired_ratio(later["one batch on the device"], later[who]),
            waited=float(np.median([run["waited_s"][1] / run["image_s"][1] for run in found])),
            cpu_ms=1e3 * float(np.median([run["cpu_s"] for run in found])),
            hits=float(np.median([run["hits"][1] for run in found])) if who == "Stoker" else None,
        )
    for epoch, seconds in (("first", first), ("later", later)):
        ratio = paired_ratio(seconds["Stoker"], seconds["torch"])
        report.target(f"{network}, {storage}: time of the {epoch} epoch to torch's", ratio, 1.03)


def fetch(args: Any, web: Served) -> Report:
    """Read all objects with more and more fetchers: later epochs, in which all have started.

    ``to_limit`` is to as many bare clients as give most: that much the server can do.
    """
    report = Report("Fetchers, from a server that is never waited for", args.smoke)
    clients = [1] if args.smoke else [1, _CLIENTS]
    results = interleave(
        {f"fetchers {n}": partial(_fetched_in, web, n) for n in counts(args.smoke)}
        | {f"bare clients {n}": partial(_got_in, web, n) for n in clients},
        args.rounds,
        warm_up=False,
    )
    for who, seconds in results.items():
        report.row(
            by=who,
            objects_per_s=1 / float(np.median(seconds)),
            to_one_fetcher=paired_ratio(results["fetchers 1"], seconds),
            to_limit=paired_ratio(results[f"bare clients {clients[-1]}"], seconds),
        )
    if not args.smoke and cores() >= 8:
        ratio = paired_ratio(results["fetchers 1"], results["fetchers 8"])
        report.target("eight fetchers to one", ratio, 6, at_least=True)
    return report


def wait(args: Any, web: Served) -> Report:
    """Read from a storage that only waits, 20 ms for each of 16 objects under way in a process."""
    report = Report("Fetchers, from a storage that only waits", args.smoke)
    each = 200 if args.smoke else 2_400
    names = counts(args.smoke)
    storages = {n: Waiting(n * each, 10_000, 16, 0.02) for n in names}
    results = interleave(
        {str(n): partial(_fetched_in, storages[n], n) for n in names}, args.rounds, warm_up=False
    )
    for n in names:
        report.row(
            fetchers=n,
            objects_per_s=1 / float(np.median(results[str(n)])),
            to_one=paired_ratio(results["1"], results[str(n)]),
        )
    if 8 in names:
        ratio = paired_ratio(results["1"], results["8"])
        report.target("eight fetchers to one", ratio, 6, at_least=True)
    return report


def _fetched_in(storage: Served | Waiting, fetchers: int) -> float:
    """Return the seconds of an object in epochs after the first."""
    found = run_alone(fetched_by, storage, fetchers, _EPOCHS, _COLLATING)
    return float(sum(found["epoch_s"][1:]) / sum(found["fetched"][1:]))


def _got_in(web: Served, clients: int) -> float:
    """Return the seconds of an object with bare clients in so many processes."""
    shares = [replace(web, names=web.names[number::clients]) for number in range(clients)]
    under_way = [Running(bare, (share,)) for share in shares]
    return max(float(each.result()["epoch_s"][0]) for each in under_way) / len(web.names)


def images(args: Any, web: Served) -> Report:
    """Decode and cut with more and more threads and processes."""
    report = Report("The image path over cores", args.smoke)
    number = 64 if args.smoke else 3_072
    names = counts(args.smoke)
    for kind in ("threads", "processes"):
        results = interleave(
            {str(n): partial(_made_in, web, kind, n, number) for n in names}, args.rounds
        )
        for n in names:
            seconds = results[str(n)]
            report.row(
                by=kind,
                count=n,
                images_per_s=number / float(np.median(seconds)),
                to_one=paired_ratio(results["1"], seconds),
            )
        if kind == "threads" and len(names) > 1:
            ratio = paired_ratio(results["1"], results["2"])
            report.target("two threads to one", ratio, 1.8, at_least=True)
    return report


def _made_in(web: Served, kind: str, count: int, number: int) -> float:
    """Return the seconds of ``number`` images with so many threads or processes."""
    files = [(web.folder / name).read_bytes() for name in web.names[:DIFFERENT]]
    pool: Executor = (
        ThreadPoolExecutor(count)
        if kind == "threads"
        else ProcessPoolExecutor(count, mp_context=get_context("fork"))
    )
    with pool:
        starts = range(0, number, _AT_A_TIME)
        list(pool.map(_make, [files] * 4 * count, range(4 * count)))  # all have started
        began = time.perf_counter()
        list(pool.map(_make, [files] * len(starts), starts))
        return time.perf_counter() - began


def _make(files: list[bytes], start: int) -> int:
    """Fill a canvas, and forget it."""
    canvas = Canvas(Train(SIZE), list(range(start, start + _AT_A_TIME)))
    for place in range(_AT_A_TIME):
        canvas.fill(place, files[(start + place) % len(files)])
    return int(canvas.pixels[0, 0, 0, 0])


def _write(folder: Path, device: str, reports: list[Report]) -> None:
    """Write the results as JSON, and as a section in Markdown."""
    name = machine()
    if device != "cpu":
        name = f"{torch.cuda.get_device_name()}, {name}, torch {torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": name, "parts": [report.to_dict() for report in reports]}
    (folder / "accelerator.json").write_text(json.dumps(found, indent=1) + "\n")
    sections = [f"## {name}\n", *(report.to_text() for report in reports)]
    (folder / "accelerator.md").write_text("\n".join(sections))


_PARTS: dict[str, Callable[[Any, Served], Report]] = {
    "images": images,
    "wait": wait,
    "fetch": fetch,
    "train": train,
}


if __name__ == "__main__":
    main()
