"""The training process of the campaign: checks every sample, writes down what it was served."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from campaign_data import CRCS, LABELS, NUM, Column, identify
from campaign_servers import die_with_parent

import stoker.pytorch
from stoker.source import Pace, Retry, open_source
from stoker.testing import FaultySource

KEPT = 6  # checkpoints of each rank
OFTEN = 2  # steps from one checkpoint to the next
RESTART = 75  # exit status: an error that a fault explains; training starts again from a checkpoint


@dataclass(frozen=True)
class Config:
    """What a run trains with."""

    seed: int
    recipe: str
    source: str
    """files, shards, http"""
    workers: int
    ranks: int
    batch: int
    cache: str
    stage: str
    disk: bool
    pool: bool
    prefetch: bool
    persistent: bool
    source_faults: float
    """Probability of each of four faults of a read."""
    pace: float
    """Seconds that the model computes in a step."""

    def describe(self) -> str:
        """Return the configuration in one line."""
        flags = [name for name in ("disk", "pool", "prefetch", "persistent") if getattr(self, name)]
        return (
            f"{self.recipe} {self.source} {self.workers}w {self.ranks}r b{self.batch} {self.cache} "
            f"{self.stage} {'+'.join(flags) or '-'}"
        )


@dataclass(frozen=True)
class Places:
    """Where a run has its files and servers."""

    root: Path
    data: Path
    """Files in class folders, and beside them ``shards/``."""
    http: str
    pool: str
    meeting: int
    """Port where ranks meet."""

    @property
    def disk(self) -> Path:
        """The small file system of the disk cache."""
        return self.root / "disk"


class Check:
    """A transform: tells which sample the bytes are, and what target came with them."""

    def __call__(self, decoded: Any) -> np.ndarray:
        """Return ``i64[2]``: the number in the bytes, and their CRC."""
        return np.array(identify(decoded), np.int64)


def to_array(raw: bytes) -> np.ndarray:
    """Decode a sample: to its bytes as an array, so that a decoded stage caches them."""
    return np.frombuffer(raw, np.uint8).copy()


class Samples(stoker.SampleDataset):
    """Samples as arrays, whose decoder has a name, so that a disk cache may keep them decoded."""

    decode_name = "array"


def make_loader(config: Config, places: Places, rank: int, incarnation: int) -> Any:
    """Return the Loader of a rank."""
    options = {"deadline": 8.0, "first": 0.05, "longest": 0.5}
    if config.source == "files":
        source: Any = open_source(str(places.data / "files"))
    else:
        where = str(places.data / "shards") if config.source == "shards" else places.http
        remote = {"pace": Pace(retry=Retry(**options)), "storage_options": {"allow_http": True}}
        more = {} if config.source == "shards" else remote
        source = open_source(f"{where}/train-{{00..07}}.tar", part="bin", **more)
    if config.source_faults and config.source != "http":
        rate = config.source_faults
        source = FaultySource(
            source,
            rates={"unavailable": rate, "corrupt": rate, "short": rate, "stall": rate * 20},
            stall=0.3,
            latency=0.001,
            seed=incarnation,
        )
    dataset = Samples(source, to_array, Check(), LABELS)
    name = config.recipe.partition(":")[0]
    loader = stoker.Loader(
        dataset,
        config.batch,
        num_workers=config.workers,
        persistent_workers=config.persistent and config.workers > 0,
        cache=stoker.Cache(
            config.cache,
            disk=places.disk / "cache" if config.disk else None,
            pool=places.pool if config.pool else None,
            stage=config.stage,
            prefetch="4MiB" if config.prefetch else 0,
        ),
        recipe=config.recipe,
        seed=config.seed,
        epochs=1000 if name == "infobatch" else None,
        rank=rank,
        world_size=config.ranks,
        return_meta=True,
        rescore=(lambda batch: _losses(batch[0][:, 0].numpy(), 0)) if name == "impact" else None,
        timeout=120 if config.workers else 0,
    )
    return loader, source


def _losses(ids: np.ndarray, epoch: int) -> Any:
    import torch

    return torch.from_numpy(1 + np.sin(ids * 0.37 + epoch)).float()


class Job:
    """One rank."""

    def __init__(
        self, config: Config, places: Places, rank: int, incarnation: int, board: np.ndarray
    ) -> None:
        self._config, self._places, self._rank = config, places, rank
        self._incarnation, self._board, self._row = incarnation, board, board[rank]
        name = f"{incarnation}-{rank}"
        self._log = os.open(places.root / f"log-{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._said = places.root / f"said-{name}"
        self._step = 0

    def run(self, start_at: tuple[int, Path] | None) -> None:
        """Train until the campaign says that it is enough; ``start_at``: steps, and their state."""
        import torch.distributed as distributed

        if self._config.ranks > 1:
            distributed.init_process_group(
                "gloo",
                f"tcp://127.0.0.1:{self._places.meeting}",
                rank=self._rank,
                world_size=self._config.ranks,
                timeout=timedelta(seconds=60),
            )
        self._row[Column.JOINED] = 1
        loader, source = make_loader(self._config, self._places, self._rank, self._incarnation)
        with loader:
            epoch = 0
            if start_at is not None:
                self._step, path = start_at
                state = pickle.loads(path.read_bytes())
                epoch = state["epoch"]
                loader.load_state_dict(state["loader"])
            while not 0 <= self._board[0, Column.LAST_EPOCH] < epoch:
                self._epoch(loader, epoch, source)
                epoch += 1
        if self._config.ranks > 1:
            distributed.destroy_process_group()

    def _epoch(self, loader: Any, epoch: int, source: Any) -> None:
        loader.set_epoch(epoch)
        length = 0
        for checks, targets, meta in loader:
            length += 1
            self._check(checks.numpy(), targets.numpy(), meta)
            self._observe(loader, meta, epoch)
            row = np.concatenate(([epoch, self._step, len(meta.ids)], meta.ids)).astype(np.int32)
            os.write(self._log, row.tobytes())
            time.sleep(self._config.pace)
            self._step += 1
            self._row[Column.STEP] = self._step
            self._row[Column.SOURCE_FAULTS] = sum(getattr(source, "faults", {}).values())
            if self._step % OFTEN == 0:
                self._save(loader, epoch)
            self._meet(Column.STEP, self._step)
        self._row[Column.LENGTH] = length
        self._row[Column.EPOCH] = epoch + 1
        self._meet(Column.EPOCH, epoch + 1)
        if self._config.recipe.startswith(("shade", "spidercache")):
            loader.end_epoch(accuracy=min(0.9, 0.1 * epoch))

    def _check(self, checks: np.ndarray, targets: np.ndarray, meta: Any) -> None:
        self._row[Column.BEAT] += 1
        ids = meta.ids.astype(np.int64)
        wrong = (checks[:, 0] != ids) | (checks[:, 1] != CRCS[ids])
        mislabelled = targets != LABELS[ids]
        if wrong.any() or mislabelled.any():
            self._row[Column.WRONG_BYTES] += int(wrong.sum())
            self._row[Column.WRONG_LABELS] += int(mislabelled.sum())
            with self._said.open("a") as file:
                print(f"wrong: {ids.tolist()} {checks.tolist()} {targets.tolist()}", file=file)

    def _observe(self, loader: Any, meta: Any, epoch: int) -> None:
        import torch

        losses = _losses(meta.ids, epoch)
        if self._config.recipe.startswith("spidercache"):
            labels = torch.from_numpy(LABELS[meta.ids])
            angle = torch.from_numpy(meta.ids * 0.7)
            spread = torch.stack([angle.cos(), angle.sin(), labels * 0.5], 1).float()
            loader.observe(losses, embeddings=spread, labels=labels, meta=meta)
        else:
            loader.observe(losses, meta=meta)

    def _save(self, loader: Any, epoch: int) -> None:
        state = pickle.dumps({"epoch": epoch, "loader": loader.state_dict()})
        path = checkpoint(self._places.root, self._incarnation, self._rank, self._step)
        path.with_suffix(".part").write_bytes(state)
        path.with_suffix(".part").rename(path)
        earlier = self._step - KEPT * OFTEN
        checkpoint(self._places.root, self._incarnation, self._rank, earlier).unlink(True)

    def _meet(self, column: Column, value: int) -> None:
        """Wait until all ranks are as far, as an all-reduce of gradients would."""
        others = self._board[: self._config.ranks]
        while (others[:, column] < value).any():
            if (others[:, Column.GONE] > 0).any():
                raise RankGone("another rank has ended")
            ended = others[:, Column.EPOCH] > self._row[Column.EPOCH]
            if column == Column.STEP and (ended & (others[:, Column.STEP] < value)).any():
                raise AssertionError(f"another rank ended the epoch before step {value}")
            time.sleep(0.001)


class RankGone(Exception):
    """Training cannot continue, as another rank has ended."""


def checkpoint(root: Path, incarnation: int, rank: int, step: int) -> Path:
    """Return where a rank keeps its state after so many steps."""
    return root / f"state-{incarnation}-{rank}-{step}.pkl"


def enter(
    config: Config,
    places: Places,
    rank: int,
    incarnation: int,
    board: np.ndarray,
    start_at: tuple[int, Path] | None,
) -> None:
    """Be one rank in a forked process; never return."""
    status = 1
    said = places.root / f"said-{incarnation}-{rank}"
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(places.root / f"out-{incarnation}-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        warnings.simplefilter("ignore")
        Job(config, places, rank, incarnation, board).run(start_at)
        status = 0
    except BaseException as error:
        status = RESTART if _is_explained(error) else 1
        with said.open("a") as file:
            print(f"{type(error).__name__}: {error}", file=file)
            traceback.print_exc(file=file)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_explained(error: BaseException) -> bool:
    """Return whether a fault that training cannot survive explains an error.

    Those are: another rank or a worker is gone, storage gave up or a sample is damaged, there is
    no room for a cache, and the process has no descriptors left. Everything else is a defect.
    """
    from stoker.errors import CapacityError, RanksUnavailable, SourceError

    if isinstance(error, (RankGone, RanksUnavailable, SourceError)):
        return True
    if isinstance(error, CapacityError):
        return True  # a full disk, or no memory, when the cache was to be made
    while error is not None:
        text = str(error)
        if "DataLoader worker" in text and "killed by signal" in text:
            return True
        if "Too many open files" in text or "gloo" in text.lower() or "Connection closed" in text:
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def served(root: Path, incarnation: int, ranks: int, steps: int) -> dict[int, np.ndarray]:
    """Return how often each sample was served, ``i64[NUM]`` by epoch, in the first ``steps``."""
    counts: dict[int, np.ndarray] = {}
    for rank in range(ranks):
        path = root / f"log-{incarnation}-{rank}"
        rows = np.frombuffer(path.read_bytes(), np.int32) if path.exists() else np.empty(0, int)
        at = 0
        while at < len(rows):
            epoch, step, length = rows[at : at + 3].tolist()
            ids = rows[at + 3 : at + 3 + length]
            if step < steps:
                tally = counts.setdefault(epoch, np.zeros(NUM, np.int64))
                np.add.at(tally, ids, 1)
            at += 3 + length
    return counts


def with_ranks(config: Config, ranks: int, workers: int) -> Config:
    """Return the same run for another number of ranks and workers."""
    return replace(config, ranks=ranks, workers=workers)
