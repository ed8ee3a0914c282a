"""Hits, joins and idle cost of 256 processes at one cache, against those of 8.

Two fleets, each at a cache of its own with the same samples (3 KB); every process is a job: it has
joined the arena and the table of jobs. Processes take turns, so that one runs at a time: a turn
reads 32 batches of 256 cached samples and tells the table of jobs of each batch, as a training loop
does. Every round has as many turns of each fleet, in the same interleaved rounds. Figures are CPU
time of the thread that reads, which other programs on the machine lengthen only through the caches
they share; joins are in wall time too, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness import Report, interleave, paired_ratio, parser, show

from stoker.jobs.board import JobTable
from stoker.jobs.member import Member, Sharing
from stoker.jobs.merged import Merged
from stoker.plan import Plan
from stoker.policy.baselines import LRU
from stoker.policy.next_use import NextUse
from stoker.store.registry import SharedArena, open_arena

SAMPLE, BATCH = 3072, 256


class Worker:
    """One process of a fleet: does what it is told, and tells what that took."""

    def __init__(self, cache: str, samples: int, batches: int) -> None:
        self._cache, self._samples, self._batches = cache, samples, batches
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # As a new process has none: the kernel takes long to make room for the 257th where
                # there are threads, some 10 ms, and more under load.
                os.closerange(3, theirs.fileno())
                os.closerange(theirs.fileno() + 1, 1 << 16)
                self._obey(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def begin(self, order: str) -> None:
        """Tell it to ``join``, to take a ``turn``, or to make ``keys`` of a batch."""
        self._socket.send(order.encode())

    def wait(self) -> tuple[float, ...]:
        """Return what its order took, once it is done."""
        told = self._socket.recv(4096)
        if not told:
            raise SystemExit("a process of the fleet failed")
        figures: tuple[float, ...] = pickle.loads(told)
        return figures

    def do(self, order: str) -> tuple[float, ...]:
        """Tell it to do something, and return what that took."""
        self.begin(order)
        return self.wait()

    def end(self) -> None:
        """Have it leave."""
        with contextlib.suppress(OSError):
            self._socket.send(b"end")  # closing says nothing: others inherited it
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _obey(self, orders: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            while (order := orders.recv(64)) not in (b"end", b""):
                match order:
                    case b"join":
                        done = self._join(stack)
                    case b"turn":
                        done = self._turn()
                    case _:
                        done = self._keys()
                orders.send(pickle.dumps(done))

    def _join(self, stack: contextlib.ExitStack) -> tuple[float, ...]:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._shared = stack.enter_context(opened(self._cache, self._samples))
        table = JobTable(self._cache, self._samples)
        policy = Merged(NextUse())
        self._member = Member(table, policy, Sharing(), token=os.getpid(), name="one of many")
        stack.callback(self._member.close)
        self._shared.arena.contains(np.zeros(1, np.uint32))
        figures = time.perf_counter() - wall, time.thread_time() - cpu
        self._rng = np.random.default_rng(os.getpid())
        self._plan = Plan(0, 0, self._rng.permutation(self._samples).astype(np.uint32))
        self._member.begin_epoch(self._plan, len(self._plan))
        self._merged = policy
        return figures

    def _turn(self) -> tuple[float, ...]:
        arena, used = self._shared.arena, [0.0, 0.0]
        positions = np.arange(BATCH)
        for _ in range(self._batches):
            ids = self._rng.integers(0, self._samples, BATCH).astype(np.uint32)
            marks = [time.thread_time()]
            found = arena.get_many(ids)[2]
            marks.append(time.thread_time())
            self._member.received(positions, 0.0)
            marks.append(time.thread_time())
            if not found.all():
                raise SystemExit("the arena lost samples that nothing evicted")
            used = [sum(pair) for pair in zip(used, np.diff(marks).tolist(), strict=True)]
        return tuple(seconds / self._batches for seconds in used)

    def _keys(self) -> tuple[float, ...]:
        used = []
        for _ in range(4):
            ids = self._rng.integers(0, self._samples, BATCH).astype(np.uint32)
            since = time.thread_time()
            self._merged.keys(ids, None, self._plan, np.arange(BATCH))
            used.append(time.thread_time() - since)
        return (statistics.median(used),)


def opened(cache: str, samples: int) -> SharedArena:
    """Return the cache, of which all samples fit."""
    return open_arena(cache, samples, samples * SAMPLE * 2, SAMPLE, LRU().regions())


@contextlib.contextmanager
def fleet(cache: str, processes: int, samples: int, batches: int) -> Iterator[list[Worker]]:
    """Run so many processes at a full cache; none has joined yet."""
    workers: list[Worker] = []
    try:
        workers += [Worker(cache, samples, batches) for _ in range(processes)]
        with opened(cache, samples) as shared:
            rng = np.random.default_rng(0)
            for start in range(0, samples, BATCH):
                ids = np.arange(start, min(start + BATCH, samples), dtype=np.uint32)
                data = rng.integers(0, 256, len(ids) * SAMPLE, dtype=np.uint8)
                shared.arena.put_many(ids, (data, np.arange(len(ids) + 1) * SAMPLE))
            yield workers
    finally:
        for worker in workers:
            worker.end()


def turns(workers: list[Worker], number: int) -> Callable[[], tuple[float, ...]]:
    """Return what has so many turns taken, and gives the medians of what they took."""
    at = 0

    def take() -> tuple[float, ...]:
        nonlocal at
        figures = []
        for _ in range(number):
            figures.append(workers[at % len(workers)].do("turn"))
            at += 1
        return tuple(statistics.median(each) for each in zip(*figures, strict=True))

    return take


def cpu_of(workers: list[Worker]) -> float:
    """Return the CPU seconds that the processes have used."""
    ticks = 0
    for worker in workers:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Parse the arguments, measure both fleets, print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--processes", type=int, default=256)
    arguments.add_argument("--samples", type=int, default=20_000)
    args = arguments.parse_args()
    many, samples, batches, rounds = args.processes, args.samples, 32, args.rounds
    if args.smoke:
        many, samples, batches, rounds = 12, 1_000, 2, 1
    sizes = {"few": 8, "many": many}
    report = Report(f"{many} processes at one cache, and 8", args.smoke)
    with contextlib.ExitStack() as stack:
        fleets = {
            name: stack.enter_context(fleet(name, number, samples, batches))
            for name, number in sizes.items()
        }
        joins = {name: [w.do("join") for w in workers] for name, workers in fleets.items()}
        before, since = cpu_of(fleets["many"]), time.monotonic()
        time.sleep(0.1 if args.smoke else 5)
        idle = (cpu_of(fleets["many"]) - before) / (time.monotonic() - since)
        taken = {name: turns(workers, many) for name, workers in fleets.items()}
        parts: dict[str, list[tuple[float, ...]]] = {name: [] for name in fleets}

        def round_of(name: str) -> float:
            parts[name].append(taken[name]())
            return sum(parts[name][-1][:2]) / BATCH

        results = interleave({n: lambda n=n: round_of(n) for n in fleets}, rounds)
        keys = {
            name: statistics.median(w.do("keys")[0] for w in workers[:8])
            for name, workers in fleets.items()
        }
    for name, number in sizes.items():
        # The first round of each is the one that is thrown away.
        get, told = (statistics.median(each) for each in zip(*parts[name][1:], strict=True))
        last = joins[name][-8:]
        report.row(
            processes=number,
            hit_us_per_sample=1e6 * get / BATCH,
            table_us_per_batch=1e6 * told,
            keys_us_per_batch=1e6 * keys[name],
            join_ms=1e3 * statistics.median(wall for wall, _ in last),
            join_cpu_ms=1e3 * statistics.median(cpu for _, cpu in last),
            joins_over_50_ms=sum(wall > 0.05 for wall, _ in joins[name]),
            slowest_join_ms=1e3 * max(wall for wall, _ in joins[name]),
        )
    report.target(
        f"hit and table, a sample, {many} / 8", paired_ratio(results["many"], results["few"]), 1.2
    )
    last = statistics.median(wall for wall, _ in joins["many"][-8:])
    report.target(f"join of the last eight of {many}, median", 1e3 * last, 50, "ms")
    report.remarks.append(f"{many} idle processes take {idle:.1%} of a core")
    show(args, report)


if __name__ == "__main__":
    main()
