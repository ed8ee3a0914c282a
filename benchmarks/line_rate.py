"""The line rate: objects a second, and processor time for each, beside a bare client.

Parts (``--part``, several allowed; by default all but the long ones):

- 3KB, 110KB, 1MB: objects of that size from nginx on this machine, whose page cache has them:
  nothing is limited but by the processors, which the server shares. A bare obstore client with 64
  threads, which forgets what it gets, against the Loader with one worker and a Feed without one,
  both with a cache of 20 % and the bytes of a batch in one piece; first and later epochs, each
  from its first batch on. ``fetch_ms`` is the processor time of the processes that read ahead,
  ``cpu_ms`` that of all, collating and the start included.
- 110KB-long, 1MB-long: the first epoch alone, of four times as many objects, which need 16 GB of
  memory: a real epoch is longer still, and what is of its start counts less.
- alone: the same objects, read by a fetcher in a process of its own whose samples are served as
  soon as they are there, in turn with the bare client: processor time only.
- fetchers: a storage that only waits, 20 ms for each of at most 16 objects under way in a process,
  with one, two, three and eight fetchers.

``--fetchers`` is Stoker's in the first three.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from feed_alone import alone
from feed_process import run_alone
from feed_servers import Unavailable, web_server
from feed_waiting import Waiting
from harness import Report, interleave, paired_ratio, parser, show

import stoker
from stoker.source.objects import ObjectSource

WAYS = 64
SIZES = {"3KB": (3_000, 48_000), "110KB": (110_000, 16_000), "1MB": (1_000_000, 2_000)}
"""Bytes of an object, and how many: a bare client takes more than a second for them."""
LONG = {"110KB-long": (110_000, 64_000), "1MB-long": (1_000_000, 8_000)}
"""The same, for longer epochs, of which there is one."""
_BATCH = 64
_BATCH_BYTES = 8 << 20  # at most: what is read ahead has room for several
TARGETS = {
    "3KB": (0.85, None),
    "110KB": (0.8, 1.0),
    "1MB": (0.8, None),
    "110KB-long": (0.8, None),
    "1MB-long": (0.8, None),
}
PARTS = (*SIZES, "alone", "fetchers")
_EPOCHS = 3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Web:
    """Objects on a web server of this machine."""

    url: str
    names: tuple[str, ...]

    def open(self) -> ObjectSource:
        """Look them up."""
        return ObjectSource(self.url, self.names, storage_options={"allow_http": True})


@contextlib.contextmanager
def nginx(size: int, number: int) -> Iterator[Web]:
    """Serve ``number`` objects of ``size`` random bytes; raises Unavailable without nginx."""
    with contextlib.ExitStack() as stack:
        served = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-served-")))
        served.chmod(0o755)  # the server's workers are another user's
        names = tuple(f"{index:06d}.bin" for index in range(number))
        for index, name in enumerate(names):
            (served / name).write_bytes(np.random.default_rng(index).bytes(size))
        os.sync()  # or the kernel writes them to disk while they are served
        port = stack.enter_context(web_server(served))
        yield Web(f"http://127.0.0.1:{port}", names)


def bare(web: Web) -> dict[str, Any]:
    """Get every object in a random order, with threads and obstore and nothing else."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(web.url, client_options={"allow_http": True})
    order = np.random.default_rng(0).permutation(len(web.names)).tolist()
    turn = count()

    def lane() -> None:
        while (index := next(turn)) < len(order):
            answer = obstore.get(store, web.names[order[index]])
            answer.meta  # noqa: B018  # what tells versions apart
            answer.bytes()

    threads = [threading.Thread(target=lane) for _ in range(WAYS)]
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"epoch_s": [time.monotonic() - began], "fetch_s": [cpu], "fetched": [len(order)]}


def through_stoker(
    web: Web | Waiting, fetchers: int | str, epochs: int, workers: int = 1
) -> dict[str, Any]:
    """Visit every object in each epoch, with workers that only collate."""
    source = web.open() if isinstance(web, Web) else web
    seconds, cpu = [], []
    with stoker.Loader(
        stoker.SampleDataset(source, decode="packed"),
        batch_size=max(1, min(_BATCH, _BATCH_BYTES // int(source.sizes.mean()))),
        num_workers=workers,
        epochs=epochs,
        persistent_workers=True,
        cache=stoker.Cache("20%", fetchers=fetchers),
        recipe="minio",
    ) as loader:
        for _ in range(epochs):
            used = fetch_seconds()
            batches = iter(loader)
            length = len(next(batches)[1]) - 1  # of offsets; the batch is not kept
            began = time.monotonic()  # processes have started by now
            rest = sum(len(offsets) - 1 for _, offsets in batches)
            seconds.append((time.monotonic() - began) * (rest + length) / rest)
            cpu.append(fetch_seconds() - used)
        fetched = [each.fetched for each in loader.epoch_stats]
    source.close()
    return {"epoch_s": seconds, "fetch_s": cpu, "fetched": fetched}


def through_feed(web: Web, fetchers: int | str, epochs: int) -> dict[str, Any]:
    """Visit every object in each epoch, a batch's bytes in one piece, with threads only."""
    source = web.open()
    seconds, cpu = [], []
    with stoker.Feed(
        source,
        max(1, min(_BATCH, _BATCH_BYTES // int(source.sizes.mean()))),
        decode="packed",
        epochs=epochs,
        cache=stoker.Cache("20%", fetchers=fetchers),
        recipe="minio",
    ) as feed:
        for _ in range(epochs):
            used = fetch_seconds()
            batches = iter(feed)
            length = len(next(batches))
            began = time.monotonic()
            rest = sum(len(batch) for batch in batches)
            seconds.append((time.monotonic() - began) * (rest + length) / rest)
            cpu.append(fetch_seconds() - used)
        fetched = [each.fetched for each in feed.epoch_stats]
    source.close()
    return {"epoch_s": seconds, "fetch_s": cpu, "fetched": fetched}


def fetch_seconds() -> float:
    """Return the processor time of the processes that read ahead here."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"stoker.prefetch." not in (process / "cmdline").read_bytes():
                continue
            if os.environ["STOKER_RUNTIME_DIR"].encode() in (process / "environ").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def objects(report: Report, args: Any, name: str) -> None:
    """From the same machine: what the processors can do."""
    size, number = (SIZES | LONG)[name]
    number = 200 if args.smoke else number
    epochs = 1 if name in LONG else _EPOCHS
    ways = {"loader": through_stoker, "feed": through_feed}
    results: dict[str, list[dict[str, Any]]] = {"bare": [], **{way: [] for way in ways}}

    def note(who: str, result: dict[str, Any]) -> float:
        results[who].append(result)
        return float(result["epoch_s"][0])

    with nginx(size, number) as web:
        contestants = {"bare": lambda: note("bare", run_alone(bare, web))} | {
            way: lambda way=way: note(way, run_alone(ways[way], web, args.fetchers, epochs))
            for way in ways
        }
        rounds = 1 if args.smoke else min(args.rounds, 5)
        first = interleave(contestants, rounds, warm_up=False)
    _add(report, name, number, results, first)


def _add(
    report: Report,
    name: str,
    number: int,
    results: dict[str, list[dict[str, Any]]],
    first: dict[str, list[float]],
) -> None:
    """Add the rows and targets of one size."""
    ms = {who: [_fetch_ms(each) for each in results[who]] for who in results}
    report.row(
        objects=name,
        loader=f"obstore, {WAYS} threads",
        epoch="",
        objects_per_s=number / float(np.median(first["bare"])),
        fetch_ms=float(np.median(ms["bare"])),
    )
    for way in ("loader", "feed"):
        rates = {"first": first[way]}
        epochs = len(results[way][0]["epoch_s"])
        if epochs > 1:
            rates["later"] = [float(np.mean(each["epoch_s"][1:])) for each in results[way]]
        visits = number * epochs
        for epoch, seconds in rates.items():
            report.row(
                objects=name,
                loader=f"Stoker, {way.title()}",
                epoch=epoch,
                objects_per_s=number / float(np.median(seconds)),
                to_bare=paired_ratio(first["bare"], seconds),
                fetch_ms=float(np.median(ms[way])),
                cpu_ms=1e3 * float(np.median([r["cpu_s"] / visits for r in results[way]])),
            )
        least, least_later = TARGETS[name]
        report.target(
            f"{name}, {way}, first epoch, speed to a bare client",
            paired_ratio(first["bare"], first[way]),
            least,
            at_least=True,
        )
        if least_later is not None:
            report.target(
                f"{name}, {way}, later epochs, speed to a bare client",
                paired_ratio(first["bare"], rates["later"]),
                least_later,
                at_least=True,
            )
            report.target(
                f"{name}, {way}, processor time a fetched object to a bare client",
                paired_ratio(ms[way], ms["bare"]),
                1.4,
            )


def _fetch_ms(result: dict[str, Any]) -> float:
    """Return the processor time of reading, for each object that was read."""
    return 1e3 * sum(result["fetch_s"]) / sum(result["fetched"])


def by_itself(report: Report, args: Any) -> None:
    """What an object costs a fetcher, without loader and worker."""
    for name, (size, number) in SIZES.items():
        number = 100 if args.smoke else number // 2
        with nginx(size, number) as web:
            rounds = 1 if args.smoke else min(args.rounds, 5)
            seconds = run_alone(alone, web.open, partial(bare, web), rounds)
        ratio = paired_ratio(seconds["fetcher"], seconds["bare"])
        report.row(
            objects=name,
            bare_us=1e6 * float(np.median(seconds["bare"])) / number,
            fetcher_us=1e6 * float(np.median(seconds["fetcher"])) / number,
            ratio=ratio,
        )
        if name == "110KB":
            report.target("110KB, processor time to a bare client", ratio, 1.4)


def fetchers(report: Report, args: Any) -> None:
    """A storage that only waits: what a further process is worth."""
    number = 400 if args.smoke else 12_000
    storage = Waiting(number, 10_000, 16, 0.02)
    seconds = interleave(
        {
            str(each): lambda each=each: run_alone(through_stoker, storage, each, 2)["epoch_s"][1]
            for each in ((1, 2) if args.smoke else (1, 2, 3, 8))
        },
        1 if args.smoke else min(args.rounds, 3),
        warm_up=False,
    )
    for each, taken in seconds.items():
        report.row(
            fetchers=int(each),
            objects_per_s=number / float(np.median(taken)),
            to_one=paired_ratio(seconds["1"], taken),
        )
    for each, least in {"2": 1.9, "8": 6.0}.items():
        if each in seconds:
            ratio = paired_ratio(seconds["1"], seconds[each])
            report.target(f"{each} fetchers to one", ratio, least, at_least=True)


def main() -> None:
    """Parse the arguments, run the parts, print a report for each."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part", nargs="+", choices=(*PARTS, *LONG), help="default: not the long ones"
    )
    arguments.add_argument("--fetchers", default="auto", help="processes that read, or auto")
    args = arguments.parse_args()
    args.fetchers = int(args.fetchers) if args.fetchers.isdecimal() else args.fetchers
    for name in args.part or (("110KB", "fetchers") if args.smoke else PARTS):
        report = Report(f"Line rate: {name}", args.smoke)
        try:
            if name in SIZES | LONG:
                objects(report, args, name)
            else:
                {"alone": by_itself, "fetchers": fetchers}[name](report, args)
        except Unavailable as reason:
            report.remarks.append(f"left out: {reason}")
        show(args, report, part=name)


if __name__ == "__main__":
    main()
