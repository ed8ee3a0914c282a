"""One run of the campaign: training or a plain program, faults, and what must hold all the same."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from campaign_data import NUM, Column
from campaign_faults import BALLAST, Faults, MemoryGroup, processes
from campaign_job import RESTART, Config, Places, checkpoint, enter, served
from campaign_servers import Server, Wires, free_port
from campaign_wire import Wire

STILL = 90.0  # seconds without progress after which a run hangs
_MOST_RESTARTS = 60
_ENDING = 30.0  # seconds that processes may take to end after the run
_RATE = 20.0  # faults a second
_PR_SET_CHILD_SUBREAPER = 36
_DISK_BYTES = 1100 << 20  # a disk cache leaves 1 GiB free when it is made
ONCE = ("foresight", "lru", "minio", "belady", "s3fifo", "quiver")
RECIPES = (
    *ONCE,
    "foresight:repeat=2",
    "icache:warm_up=1:package_bytes=50000",
    "impact:max_warm_up=2:package_bytes=50000",
    "spidercache",
    "shade",
    "infobatch",
)


@dataclass
class Outcome:
    """What came out of a run."""

    seed: int
    what: str
    faults: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    samples: int = 0
    wrong_bytes: int = 0
    wrong_labels: int = 0
    not_once: int = 0
    """Samples served twice or never in an epoch that promises each once."""
    hangs: int = 0
    failures: int = 0
    """Processes that ended with an error that no fault explains."""
    leaks: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether all that must hold did."""
        counts = (self.wrong_bytes, self.wrong_labels, self.not_once)
        return not any((*counts, self.hangs, self.failures, self.leaks))


@dataclass
class Stage:
    """What runs of one process share: data, servers, wires."""

    root: Path
    data: Path
    pool: Server | None
    http: Server | None
    wires: Wires
    clock: Path | None
    can_mount: bool
    memory: MemoryGroup | None

    def servers(self, config: Config) -> dict[str, object]:
        """Return the servers that a run uses, by name."""
        used = {"pool": self.pool if config.pool else None}
        used["http"] = self.http if config.source == "http" else None
        return {name: server for name, server in used.items() if server is not None}


def draw_config(draw: random.Random, stage: Stage) -> Config:
    """Return what a run trains with."""
    recipe = draw.choice(RECIPES)
    sources = ["files", "shards"] + ["http"] * (stage.http is not None)
    source = draw.choice(sources)
    return Config(
        seed=draw.randrange(1 << 32),
        recipe=recipe,
        source=source,
        workers=draw.choice([0, 1, 1, 2, 3]),
        ranks=draw.choice([1, 1, 1, 2, 3]),
        batch=draw.choice([6, 12]),
        cache=draw.choice(["5%", "20%", "50%", "100%"]),
        stage=draw.choice(["encoded", "encoded", "decoded"]),
        disk=draw.random() < 0.6,
        pool=stage.pool is not None and draw.random() < 0.5,
        prefetch=draw.random() < 0.75,
        persistent=draw.random() < 0.5,
        source_faults=draw.choice([0, 0, 0.0002]),
        pace=draw.choice([0.0, 0.005, 0.015]),
    )


class Run:
    """One run; :meth:`go` does it all and returns what came out."""

    def __init__(self, seed: int, stage: Stage) -> None:
        self._draw = random.Random(seed)
        self._stage = stage
        self._root = stage.root / f"run-{seed}"
        self._is_tiering = self._draw.random() < 0.2
        self._config = draw_config(self._draw, stage)
        self._outcome = Outcome(seed, "")
        self._budget = self._draw.randint(150, 300)
        self._ranks: dict[int, int] = {}
        self._board = np.frombuffer(mmap.mmap(-1, 4096), np.int64).reshape(8, -1)

    def go(self) -> Outcome:
        """Do the run, and check what must hold."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._root.mkdir(parents=True)
        disk = self._root / "disk"
        disk.mkdir()
        for name in ("run", "tmp"):
            shutil.rmtree(self._stage.root / name, ignore_errors=True)
            (self._stage.root / name).mkdir(mode=0o700)
        if self._stage.can_mount:
            options = f"size={_DISK_BYTES},mode=700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)
        memory = _names_in_memory()
        try:
            self._faults = self._make_faults(disk)
            if self._is_tiering:
                self._outcome.what = "stoker run"
                self._tiering(disk)
            else:
                self._outcome.what = self._config.describe()
                self._training()
            self._faults.tend(everything=True)
            self._await_end()
            self._look_for_leftovers(memory)
        finally:
            self._kill_all()
            if self._stage.can_mount:
                subprocess.run(["umount", "-l", disk], check=True)
            if self._outcome.is_clean:
                shutil.rmtree(self._root, ignore_errors=True)
        self._outcome.faults = self._faults.counts
        return self._outcome

    # --- training ---

    def _training(self) -> None:
        stage, config = self._stage, self._config
        near = dict(zip(("pool", "http"), stage.wires.ports, strict=False))
        places = Places(
            root=self._root,
            data=stage.data,
            http=f"http://127.0.0.1:{near.get('http')}/shards",
            pool=f"valkey://127.0.0.1:{near.get('pool')}",
            meeting=0,
        )
        start_at: tuple[int, list[Path]] | None = None
        tally: dict[int, np.ndarray] = {}
        self._board[:] = 0
        self._board[0, Column.LAST_EPOCH] = -1
        for incarnation in range(_MOST_RESTARTS):
            statuses = self._one_life(config, places, incarnation, start_at)
            if statuses is None:
                return  # it hung
            self._count_wrongs()
            over = all(status == 0 for status in statuses.values())
            if not over and not self._explained(statuses, incarnation):
                return
            steps = 1 << 60 if over else 0
            if not over:
                start_at, steps = self._restart_point(config, incarnation, start_at)
                self._outcome.restarts += 1
            for epoch, counts in served(self._root, incarnation, config.ranks, steps).items():
                tally[epoch] = tally.get(epoch, 0) + counts
            if over:
                self._check_once(config, tally)
                return
            config = replace(
                config, ranks=self._draw.choice([1, 2, 3, config.ranks]),
                workers=self._draw.choice([0, 1, 2, config.workers]),
            )  # fmt: skip
        self._fail(f"still not over after {_MOST_RESTARTS} starts")

    def _one_life(
        self,
        config: Config,
        places: Places,
        incarnation: int,
        start_at: tuple[int, list[Path]] | None,
    ) -> dict[int, int] | None:
        """Start all ranks and return their exit statuses; None if they hung."""
        self._faults.tend(everything=True)
        steps = 0 if start_at is None else start_at[0]
        places = replace(places, meeting=free_port())
        last = int(self._board[0, Column.LAST_EPOCH])
        self._board[:, Column.STEP] = steps
        self._board[:, Column.GONE] = 0
        self._board[:, Column.JOINED] = 0
        self._board[:, Column.SOURCE_FAULTS] = 0
        self._board[:, Column.EPOCH] = 0 if start_at is None else self._epoch_at_start
        self._board[0, Column.LAST_EPOCH] = last
        for rank in range(config.ranks):
            own = None if start_at is None else (steps, start_at[1][rank % len(start_at[1])])
            pid = os.fork()
            if not pid:
                if self._stage.memory is not None:
                    self._stage.memory.enter()
                enter(config, places, rank, incarnation, self._board, own)
            self._ranks[rank] = pid
        statuses: dict[int, int] = {}
        first_gone = None

        def tend() -> bool:
            nonlocal first_gone
            for pid, status in _reap():
                for rank, own_pid in self._ranks.items():
                    if pid == own_pid:
                        statuses[rank] = os.waitstatus_to_exitcode(status)
                        self._board[rank, Column.GONE] = 1
                        if statuses[rank]:
                            first_gone = first_gone or time.monotonic()
            if first_gone and not self._board[: config.ranks, Column.JOINED].all():
                self._kill_all(("rank",))  # how long others wait for it is torch's
            if first_gone and time.monotonic() - first_gone > STILL:
                raise _Hang("ranks did not end after one of them had")
            return len(statuses) < config.ranks

        ended = self._watch(tend)
        faults = int(self._board[: config.ranks, Column.SOURCE_FAULTS].sum())
        if faults:
            self._faults.count("source: error, damage or stall", faults)
        self._ranks = {}
        return statuses if ended else None

    def _explained(self, statuses: dict[int, int], incarnation: int) -> bool:
        """Return whether faults explain how processes ended; note it if not."""
        counts = self._faults.counts
        killed = counts.get("killed: rank", 0) + counts.get("memory limited", 0)
        killed += not self._board[: len(statuses), Column.JOINED].all()
        good = True
        for rank, status in statuses.items():
            if status in (0, RESTART) or (status == -signal.SIGKILL and killed):
                continue
            good = False
            text = f"rank {rank} ended with status {status}"
            for name in ("said", "out"):
                path = self._root / f"{name}-{incarnation}-{rank}"
                if path.exists():
                    text += "\n" + path.read_text(errors="replace")[-3000:]
            self._fail(text)
        return good

    def _restart_point(
        self, config: Config, incarnation: int, before: tuple[int, list[Path]] | None
    ) -> tuple[tuple[int, list[Path]] | None, int]:
        """Return the latest state that all ranks of a life have saved, and its steps.

        Without one it is the state that this life began with, and nothing of it counts.
        """
        common: set[int] | None = None
        for rank in range(config.ranks):
            found = self._root.glob(f"state-{incarnation}-{rank}-*.pkl")
            steps = {int(path.stem.rpartition("-")[2]) for path in found}
            common = steps if common is None else common & steps
        if not common:
            return before, 0 if before is None else before[0]
        step = max(common)
        paths = [checkpoint(self._root, incarnation, rank, step) for rank in range(config.ranks)]
        self._epoch_at_start = _epoch_of(paths[0])
        return (step, paths), step

    _epoch_at_start = 0

    def _check_once(self, config: Config, tally: dict[int, np.ndarray]) -> None:
        """Check how often each sample was served in the epochs of the run."""
        self._outcome.samples += int(sum(counts.sum() for counts in tally.values()))
        if config.recipe in ONCE:
            for epoch, counts in tally.items():
                off = int((counts != 1).sum())
                if off:
                    self._outcome.not_once += off
                    self._outcome.said.append(
                        f"epoch {epoch}: {int((counts > 1).sum())} samples more than once, "
                        f"{int((counts == 0).sum())} never"
                    )
        elif config.recipe == "foresight:repeat=2":
            for first in range(0, max(tally) // 2 * 2, 2):
                counts = tally[first] + tally[first + 1]
                if (counts != 2).any():
                    self._outcome.not_once += int((counts != 2).sum())
                    self._outcome.said.append(f"epochs {first}, {first + 1}: not twice each")
        elif any(int(counts.sum()) == 0 for counts in tally.values()):
            self._outcome.not_once += NUM

    # --- a program under `stoker run` ---

    def _tiering(self, disk: Path) -> None:
        source = self._root / "source"
        shutil.copytree(self._stage.data / "files", source)
        path = self._root / "board"
        path.write_bytes(bytes(8 * 16))
        with path.open("r+b") as file:
            row = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        self._board = row.reshape(1, -1)
        row[Column.LAST_EPOCH] = -1
        quota = self._draw.choice(["1MiB", "3MiB", "100MiB"])
        command = [
            *(sys.executable, "-c", "from stoker.cli import main; main()", "run"),
            *(f"--source={source}", f"--tier={disk / 'tier'}:{quota}", "--", sys.executable),
            *(str(Path(__file__).with_name("campaign_reader.py")), str(source), str(path)),
        ]
        for life in range(_MOST_RESTARTS):
            row[Column.JOINED] = 0
            out = self._root / f"out-{life}-0"
            with out.open("wb") as file:
                process = subprocess.Popen([*command, str(life)], stdout=file, stderr=file)
            self._ranks = {0: process.pid}
            if not self._watch(lambda process=process: process.poll() is None):
                return
            self._ranks = {}
            self._count_wrongs()
            if self._outcome.wrong_bytes or self._outcome.wrong_labels:
                self._outcome.said.append(out.read_text(errors="replace")[:1000])
            if process.returncode == 0:
                break
            if process.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
                text = out.read_text(errors="replace")[-6000:]
                self._fail(f"stoker run ended with status {process.returncode}\n{text}")
                return
            self._outcome.restarts += 1
            self._kill_all(("reader", "other"))
        self._outcome.samples += int(row[Column.BEAT])

    # --- both ---

    def _watch(self, is_running: Callable[[], bool]) -> bool:
        """Inject faults until the processes have ended; return False if they hung."""
        self._next = time.monotonic() + 0.3
        before, since = None, time.monotonic()
        while True:
            try:
                if not is_running():
                    return True
            except _Hang as hang:
                self._hang(str(hang))
                return False
            now = time.monotonic()
            self._faults.tend()
            beats = self._board[:, : Column.GONE].tobytes()
            if beats != before or now < self._faults.excuse:
                before, since = beats, now
            if now - since > STILL:
                self._hang(f"no progress for {STILL:.0f} s")
                return False
            if self._faults.total >= self._budget:
                if self._board[0, Column.LAST_EPOCH] < 0:
                    self._board[0, Column.LAST_EPOCH] = self._board[:, Column.EPOCH].max() + 1
            elif now >= self._next:
                if self._board[: len(self._ranks), Column.JOINED].all():
                    self._inject()
                self._next = now + self._draw.expovariate(_RATE)
            time.sleep(0.005)

    def _inject(self) -> None:
        faults, ranks = self._faults, self._ranks
        wires = (Wire.FLIP_ANSWER, Wire.FLIP_QUESTION, Wire.CUT, Wire.HOLD)
        config = self._config
        ways: list[tuple[float, Callable[[], bool]]] = [
            (6, lambda: faults.stop(ranks)),
            (2, lambda: faults.descriptors(ranks)),
            (2, faults.clock_jumps),
            (2, faults.full_disk),
            (0.5, faults.memory_limit),
        ]
        if self._is_tiering:
            ways += [
                (1, lambda: faults.kill(("reader", "launcher", "rank"), ranks)),
                (3, lambda: faults.kill(("tiering",), ranks)),
                (8, faults.remove_copy),
            ]
        else:
            ways += [
                (0.3, lambda: faults.kill(("rank",), ranks)),
                (0.3, lambda: faults.kill(("worker",), ranks)),
                (4, lambda: faults.kill(("prefetch", "packager", "helper"), ranks)),
                (8, faults.damage_disk),
            ]
        if not self._is_tiering and config.pool:
            ways += [(8, faults.damage_pool), (6, lambda: faults.damage_wire(0, "pool", wires))]
        if not self._is_tiering and config.source == "http":
            index = 1 if self._stage.pool is not None else 0
            ways.append((4, lambda: faults.damage_wire(index, "http", (Wire.CUT, Wire.HOLD))))
        if faults.servers:
            ways.append((2, faults.lose_server))
        weights = [weight for weight, _ in ways]
        with contextlib.suppress(OSError):  # what another fault makes impossible just now
            self._draw.choices(ways, weights)[0][1]()

    def _make_faults(self, disk: Path) -> Faults:
        stage, config = self._stage, self._config
        has_pool = config.pool and not self._is_tiering
        return Faults(
            draw=self._draw,
            root=self._root,
            disk=disk if stage.can_mount and (config.disk or self._is_tiering) else None,
            control=stage.wires.control,
            clock=stage.clock,
            memory=None if self._is_tiering else stage.memory,
            servers={} if self._is_tiering else stage.servers(config),
            client=self._client if has_pool else None,
        )

    def _client(self) -> object:
        import redis

        assert self._stage.pool is not None
        return redis.Redis(port=self._stage.pool.port, socket_timeout=2)

    def _count_wrongs(self) -> None:
        self._outcome.wrong_bytes = int(self._board[:, Column.WRONG_BYTES].sum())
        self._outcome.wrong_labels = int(self._board[:, Column.WRONG_LABELS].sum())
        for path in sorted(self._root.glob("said-*")):
            lines = [line for line in path.read_text().splitlines() if line.startswith("wrong")]
            self._outcome.said += [line for line in lines[:3] if line not in self._outcome.said]

    def _fail(self, what: str) -> None:
        self._outcome.failures += 1
        self._outcome.said.append(what)

    def _hang(self, what: str) -> None:
        self._outcome.hangs += 1
        self._faults.tend(everything=True)
        self._count_wrongs()
        found = processes(self._ranks)
        for process in found:
            if process.role in ("rank", "worker") and not self._is_tiering:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for process in found:
            what += (
                f"\n  {process.pid} {process.role}: {process.command[:150]} {_where(process.pid)}"
            )
        for path in sorted(self._root.glob("out-*"), key=lambda path: path.stat().st_mtime)[-3:]:
            what += f"\n--- {path.name}\n" + path.read_text(errors="replace")[-4000:]
        self._outcome.said.append(what)

    def _await_end(self) -> None:
        """Wait until no process of the run is left; count those that stay as leaks."""
        end = time.monotonic() + _ENDING
        while left := processes({}):
            _reap()
            if time.monotonic() > end:
                if not self._outcome.hangs and not self._outcome.failures:
                    self._outcome.leaks += len(left)
                    lines = [f"{p.pid} {p.role} {p.command} {_where(p.pid)}" for p in left]
                    self._outcome.said += [f"still there: {line}" for line in lines]
                return
            time.sleep(0.05)

    def _look_for_leftovers(self, memory: set[str]) -> None:
        """Count files that the run left where the next one would not use them."""
        if self._outcome.hangs or self._outcome.failures:
            return
        left = [f"/dev/shm/{name}" for name in _names_in_memory() - memory]
        for name in ("run", "tmp"):
            folder = self._stage.root / name
            left += [str(path) for path in folder.rglob("*") if not path.is_dir()]
        (self._root / "disk" / BALLAST).unlink(True)
        for path in left:
            if not _is_kept(Path(path)):
                self._outcome.leaks += 1
                self._outcome.said.append(f"left behind: {path}")

    def _kill_all(self, roles: tuple[str, ...] | None = None) -> None:
        for process in processes(self._ranks):
            if roles is None or process.role in roles:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while time.monotonic() < end and any(
            roles is None or process.role in roles for process in processes(self._ranks)
        ):
            time.sleep(0.01)


class _Hang(Exception):
    pass


def _is_kept(path: Path) -> bool:
    """Return whether a file is one of those that stay on purpose: empty lock files."""
    return path.suffix == ".lock" and path.stat().st_size == 0


def _names_in_memory() -> set[str]:
    """Return the files in /dev/shm, but for semaphores: Stoker has none that have a name."""
    names = (path.name for path in Path("/dev/shm").iterdir())
    return {name for name in names if not name.startswith("sem.")}


def _epoch_of(path: Path) -> int:
    import pickle

    epoch: int = pickle.loads(path.read_bytes())["epoch"]  # written by this run
    return epoch


def _reap() -> list[tuple[int, int]]:
    """Return ``(pid, status)`` of children that have ended, but for servers' own handles."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, status))


def _where(pid: int) -> str:
    try:
        return (Path(f"/proc/{pid}/wchan")).read_text()
    except OSError:
        return ""
