"""Reads what ``Loader(trace=PATH)`` wrote, an epoch at a time.

The columns of a ROWS or BEGIN block of one rank, of which any may be missing:

- a batch handed out: ``batch_size``, ``position`` (of its first access in the plan of all ranks,
  the others follow ``apart`` of the run, or ``world_size``), ``time`` (s since the file was
  opened), ``stall`` (s); ``ids`` and ``outcomes`` of its samples as they were served. Where
  another one had been asked for, ``asked_at`` (row of the block's ids) and ``asked``.
- losses shown: ``step_batch`` (batch of this block, -1: another one, with its ``step_ids``),
  ``step_size``, ``step_aside`` (1: not training's), ``losses``.
- scores given: ``update_step`` (step of this block, -1: another one, with its ``update_ids``),
  ``update_size``, ``update_aside``, ``update_is_loss`` (1: the scores are the losses), else
  ``values``. For some of them neighbours: ``near_update``, ``near_size``, ``near_ids``,
  ``near_degree``, ``near``.
- ``begin`` (JSON of the run), ``ready`` and ``volatile`` (what the scorer asked for), ``accuracy``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.trace_file import Block, Kind, TraceReader, damage_named
from stoker.errors import ConfigError
from stoker.importance.base import Neighbours

Ids = NDArray[np.uint32]
_NO_IDS = np.empty(0, np.uint32)


class Shown(NamedTuple):
    """The losses of one batch."""

    ids: Ids
    """``u32[n]``, those of its samples whose losses were finite."""
    losses: NDArray[np.float64]
    """``f64[n]``."""
    is_aside: bool
    """Whether they were rescored before the epoch, and not by a step of training."""


class Update(NamedTuple):
    """The scores that the samples of one batch got."""

    ids: Ids
    """``u32[n]``."""
    values: NDArray[np.float64]
    """``f64[n]``."""
    neighbours: Neighbours | None
    is_aside: bool
    """Whether they were rescored before the epoch, and not by a step of training."""


@dataclass
class EpochTrace:
    """What happened in one epoch, over all ranks, in the order of the plan."""

    epoch: int
    asked: Ids = field(default_factory=lambda: _NO_IDS)
    """``u32[A]``, the accesses as planned."""
    ids: Ids = field(default_factory=lambda: _NO_IDS)
    """``u32[A]``, the samples really served."""
    outcomes: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    """``i8[A]``, a :class:`~stoker.types.Outcome` each."""
    batch_sizes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """``i64[B]``, accesses of each step of all ranks together."""
    times: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """``f64[B]``, seconds when the first rank got each batch, from when its file was opened."""
    stalls: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """``f64[B]``, seconds that the first rank waited for each."""
    shown: list[Shown] = field(default_factory=list)
    """The losses of each batch that was observed, in order, those shown aside first."""
    updates: list[Update] = field(default_factory=list)
    """All changes of the scores in order, those made aside first."""
    accuracy: float | None = None
    ready: bool = True
    """Whether the scorer was past its warm-up as the epoch began."""
    volatile: Ids = field(default_factory=lambda: _NO_IDS)
    """``u32[m]``, samples that the scorer wanted to be rescored."""


class Trace:
    """A recorded training; the files of several ranks (``path``, ``path.1`` ...) as one.

    Holds an index of blocks, and reads the epochs asked for. What a run did again, after it had
    resumed from an earlier state, counts as it was done last. Also a context manager; used by one
    thread. Raises :class:`~stoker.errors.ConfigError` for files that are no traces, do not belong
    together, or are damaged; and OSError when they cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._ranks = [_RankTrace(file) for file in _files(self.path)]
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def about(self) -> dict[str, Any]:
        """What was recorded: ``dataset``, ``num_samples``, ``visited``, ``recipe``, ``seed``."""
        return self._ranks[0].about

    @property
    def run(self) -> dict[str, Any]:
        """How it began last: ``batch_size`` (of a rank), ``world_size``, ``cache_bytes``, ..."""
        return self._ranks[0].run

    @property
    def num_samples(self) -> int:
        """Samples of the data set."""
        return int(self.about["num_samples"])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``i64[N]``, bytes of each sample; estimates where the source had no better."""
        return self._ranks[0].sizes()

    @property
    def batch_size(self) -> int:
        """Accesses of a step of all ranks together."""
        return int(self.run["batch_size"]) * int(self.run["world_size"])

    @property
    def epochs(self) -> list[int]:
        """The epochs of which all ranks have written something, ascending."""
        return sorted(set.intersection(*(set(rank.epochs) for rank in self._ranks)))

    def __len__(self) -> int:
        """Epochs that there are."""
        return len(self.epochs)

    def __iter__(self) -> Iterator[EpochTrace]:
        """Yield the epochs one by one."""
        return map(self.epoch, self.epochs)

    def epoch(self, epoch: int) -> EpochTrace:
        """Return one epoch; ConfigError if it is not there."""
        if any(epoch not in rank.epochs for rank in self._ranks):
            raise ConfigError(f"the trace {self.path} has no epoch {epoch}: it has {self.epochs}")
        parts = [rank.epoch(epoch) for rank in self._ranks]
        return parts[0].found if len(parts) == 1 else _merged(parts)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for rank in self._ranks:
            rank.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self) -> None:
        first = self._ranks[0]
        for rank in self._ranks:
            if rank.about != first.about:
                raise ConfigError(f"{rank.path} is of another run than {first.path}: remove it")


def _files(path: Path) -> list[Path]:
    """Return the files of all ranks: ``path``, and those beside it that number up from 1."""
    found = [path]
    while (other := path.with_name(f"{path.name}.{len(found)}")).exists():
        found.append(other)
    return found


class _Part(NamedTuple):
    """An epoch of one rank, and where its accesses stand in the plan of all."""

    found: EpochTrace
    positions: NDArray[np.int64]


class _RankTrace:
    """The file of one rank: which of its blocks belong to which epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TraceReader(path)
        self.about = self._file.about
        self.run: dict[str, Any] = {}
        self.epochs: dict[int, list[Block]] = {}
        try:
            if not self._file.blocks:
                raise ConfigError(f"{path} has nothing in it: the run ended as it began")
            with damage_named(f"{path} is damaged where an epoch begins"):
                self._index()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def sizes(self) -> NDArray[np.int64]:
        blocks = [block for block in self._file.blocks if block.kind == Kind.SIZES]
        with damage_named(f"{self.path} has damaged sizes"):
            parts = [self._file.read(block)["sizes"].astype(np.int64) for block in blocks]
            return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def epoch(self, epoch: int) -> _Part:
        part = _Assembly(epoch)
        with damage_named(f"{self.path} is damaged in epoch {epoch}"):
            for block in self.epochs[epoch]:
                part.add(self._file.read(block))
            return part.result()

    def _index(self) -> None:
        for block in self._file.blocks:
            if block.kind == Kind.BEGIN:
                self.run = _json(self._file.read(block)["begin"])
                self._forget_from(block.epoch, self.run["consumed"])
            if block.kind in (Kind.BEGIN, Kind.ROWS):
                self.epochs.setdefault(block.epoch, []).append(block)
        # An epoch that only began: the loader was sent to another one, or it ended there.
        self.epochs = {e: blocks for e, blocks in self.epochs.items() if len(blocks) > 1}

    def _forget_from(self, epoch: int, consumed: int) -> None:
        """What begins in the middle of ``epoch`` takes the place of what came after that."""
        self.epochs = {e: b for e, b in self.epochs.items() if e < epoch + bool(consumed)}


class _Assembly:
    """Puts the blocks of a rank's epoch together."""

    def __init__(self, epoch: int) -> None:
        self._found = EpochTrace(epoch)
        self._apart = 1
        self._columns: dict[str, list[NDArray[Any]]] = {}
        self._positions: list[NDArray[np.int64]] = []
        self._steps = 0

    def add(self, columns: dict[str, NDArray[Any]]) -> None:
        """Append what one block has."""
        if "begin" in columns:
            run = _json(columns["begin"])
            self._apart = int(run.get("apart", run["world_size"]))
            self._cut(int(run["consumed"]))
        found = self._found
        if "ready" in columns:
            found.ready, found.volatile = bool(columns["ready"][0]), columns["volatile"]
        if "accuracy" in columns:
            found.accuracy = float(columns["accuracy"][0])
        if "ids" in columns:
            self._add_batches(columns)
        shown = _shown(columns)
        found.shown += shown
        updates = _updates(columns, shown, self._steps)
        found.updates += updates
        self._steps += len(updates)

    def result(self) -> _Part:
        """Return the epoch."""
        found = self._found
        if self._positions:
            for name, dtype in _BATCH_COLUMNS.items():
                setattr(found, name, np.concatenate(self._columns[name]).astype(dtype))
        positions = np.concatenate([np.empty(0, np.int64), *self._positions])
        return _Part(found, positions)

    def _add_batches(self, columns: dict[str, NDArray[Any]]) -> None:
        sizes = columns["batch_size"].astype(np.int64)
        if sizes.min() < 0 or sizes.sum() != len(columns["ids"]):
            raise ValueError("batches of another number of samples than there are")
        ends = np.cumsum(sizes)
        within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
        self._positions.append(np.repeat(columns["position"], sizes) + within * self._apart)
        asked = columns["ids"].copy()
        if "asked" in columns:
            asked[columns["asked_at"]] = columns["asked"]
        taken = {"asked": asked, "batch_sizes": sizes, "times": columns["time"]}
        taken |= {"ids": columns["ids"], "outcomes": columns["outcomes"]}
        for name, column in (taken | {"stalls": columns["stall"]}).items():
            self._columns.setdefault(name, []).append(column)

    def _cut(self, consumed: int) -> None:
        """Leave out batches from ``consumed`` on, which were handed out again, and their scores."""
        if not self._positions:
            return
        positions = np.concatenate(self._positions)
        sizes = np.concatenate(self._columns["batch_sizes"])
        keep = positions[np.cumsum(sizes) - sizes] < consumed
        rows = np.repeat(keep, sizes)
        self._positions = [positions[rows]]
        for name in self._columns:
            joined = np.concatenate(self._columns[name])
            self._columns[name] = [joined[rows if len(joined) == len(rows) else keep]]
        found, kept = self._found, int(keep.sum())
        found.shown = found.shown[: kept + sum(shown.is_aside for shown in found.shown)]
        found.updates = found.updates[: kept + sum(update.is_aside for update in found.updates)]


_BATCH_COLUMNS = {
    "asked": np.uint32,
    "ids": np.uint32,
    "outcomes": np.int8,
    "batch_sizes": np.int64,
    "times": np.float64,
    "stalls": np.float64,
}


def _shown(columns: dict[str, NDArray[Any]]) -> list[Shown]:
    """Return the steps of a block."""
    if "step_size" not in columns:
        return []
    batches = _split(columns["ids"], columns["batch_size"]) if "ids" in columns else []
    apart = _Queue(columns.get("step_ids"))
    losses = _Queue(columns["losses"].astype(np.float64))
    names = ("step_batch", "step_size", "step_aside")
    return [
        Shown(batches[b] if b >= 0 else apart.take(n), losses.take(n), bool(aside))
        for b, n, aside in zip(*(columns[name].tolist() for name in names), strict=True)
    ]


def _updates(
    columns: dict[str, NDArray[Any]],
    shown: list[Shown],
    number: int,
) -> list[Update]:
    """Return the updates of a block, the first of which is the epoch's ``number``."""
    if "update_size" not in columns:
        return []
    apart, values = _Queue(columns.get("update_ids")), _Queue(columns.get("values"))
    names = ("update_step", "update_size", "update_aside", "update_is_loss")
    found = []
    near = _neighbours(columns, number)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    for i, (step, size, is_aside, is_loss) in enumerate(rows):
        ids = shown[step][0] if step >= 0 else apart.take(size)
        scores = shown[step][1] if is_loss else values.take(size).astype(np.float64)
        found.append(Update(ids, scores, near.get(i), bool(is_aside)))
    return found


def _neighbours(columns: dict[str, NDArray[Any]], number: int) -> dict[int, Neighbours]:
    if "near_size" not in columns:
        return {}
    ids, degrees = _Queue(columns["near_ids"]), _Queue(columns["near_degree"])
    others = _Queue(columns["near"])
    found = {}
    for row, size in zip(
        columns["near_update"].tolist(), columns["near_size"].tolist(), strict=True
    ):
        degree = degrees.take(size).astype(np.int64)
        near = others.take(int(degree.sum()))
        found[row] = Neighbours.listed(number + row, ids.take(size), degree, near)
    return found


class _Queue:
    """An array of which parts are taken one after the other."""

    def __init__(self, array: NDArray[Any] | None) -> None:
        self._array, self._at = (_NO_IDS if array is None else array), 0

    def take(self, length: int) -> NDArray[Any]:
        self._at += length
        return self._array[self._at - length : self._at]


def _merged(parts: list[_Part]) -> EpochTrace:
    """Return the epochs of several ranks as one, in the order of the plan."""
    # A rank that was killed first has fewer steps: what all have is what the job has done.
    steps = min(len(part.found.batch_sizes) for part in parts)
    cut = [_Part(_first(part.found, steps), part.positions) for part in parts]
    lengths = [len(part.found.ids) for part in cut]
    joined = [part.positions[:n] for part, n in zip(cut, lengths, strict=True)]
    order = np.argsort(np.concatenate(joined), kind="stable")
    found, first = EpochTrace(cut[0].found.epoch), cut[0].found
    for name in ("asked", "ids", "outcomes"):
        setattr(found, name, np.concatenate([getattr(part.found, name) for part in cut])[order])
    found.batch_sizes = np.sum([part.found.batch_sizes for part in cut], axis=0)
    found.times, found.stalls = first.times, first.stalls
    found.accuracy, found.ready, found.volatile = first.accuracy, first.ready, first.volatile
    for name in ("shown", "updates"):
        setattr(found, name, _interleaved([getattr(part.found, name) for part in cut]))
    return found


def _first(found: EpochTrace, steps: int) -> EpochTrace:
    """Return the first so many batches of a rank."""
    accesses = int(found.batch_sizes[:steps].sum())
    rows = {name: getattr(found, name)[:accesses] for name in ("asked", "ids", "outcomes")}
    rest = {name: getattr(found, name)[:steps] for name in ("batch_sizes", "times", "stalls")}
    return EpochTrace(**{**vars(found), **rows, **rest})


def _interleaved(lists: list[list[Any]]) -> list[Any]:
    """Return what all ranks did first, then what they did second, and so on."""
    longest = max(map(len, lists))
    return [items[i] for i in range(longest) for items in lists if i < len(items)]


def _split(joined: NDArray[Any], sizes: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(joined, np.cumsum(sizes.astype(np.int64))[:-1]) if len(sizes) else []


def _json(column: NDArray[np.uint8]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(column.tobytes())
    return found
