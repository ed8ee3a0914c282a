"""Writes down what a training did, for the simulator: ``Loader(trace=PATH)``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import ServedBatch
from stoker.epoch.trace_file import Kind, TraceWriter
from stoker.errors import ConfigError, warn_caller
from stoker.importance.base import Neighbours
from stoker.plan import Plan

_BLOCK_BYTES = 64 << 10  # what is written at once; so much is lost when the process is killed
_BLOCK_SECONDS = 5.0  # or what came in this time

Ids = NDArray[np.uint32]
_Rest = ParamSpec("_Rest")


def trace_path(trace: str | os.PathLike[str] | None) -> Path | None:
    """Return where to write a trace, checked as far as it can be before ranks are known.

    Raises :class:`~stoker.errors.ConfigError` for a path that is none, that lies in no folder, or
    is a folder.
    """
    if trace is None:
        return None
    if not isinstance(trace, (str, os.PathLike)):
        raise ConfigError(f"trace={trace!r} is no path: give the file to write")
    path = Path(trace)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"trace={str(path)!r} lies in a folder that is not there: make it first")
    if path.is_dir():
        raise ConfigError(f"trace={str(path)!r} is a folder: give the file to write")
    return path


def rank_path(path: Path, rank: int) -> Path:
    """Return the file of one rank: ``path`` for the first, ``path.1`` and so on for others."""
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


def _harmless(
    method: Callable[Concatenate[Tracer, _Rest], None],
) -> Callable[Concatenate[Tracer, _Rest], None]:
    """Let nothing that goes wrong reach the training loop: one warning, and the trace ends."""

    @wraps(method)
    def run(tracer: Tracer, /, *arguments: _Rest.args, **named: _Rest.kwargs) -> None:
        if tracer._file is None:
            return
        begin = time.perf_counter()
        try:
            method(tracer, *arguments, **named)
        except Exception as error:  # not an error of training's, whatever it is
            tracer._fail(error)
        tracer.seconds += time.perf_counter() - begin

    return run


class Tracer:
    """Collects what happens in one rank, and appends it to its file block by block.

    ``about`` says which run it is; a file of the same run is appended to, that of another is
    refused by ConfigError. All else that goes wrong ends the trace with one warning. Used by the
    training process only, from one thread; does nothing in a forked child.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], sizes: NDArray[np.int64]) -> None:
        self.seconds = 0.0
        """Time that it took from the training loop."""
        self._path, self._pid = path, os.getpid()
        self._file: TraceWriter | None = None
        self._epoch = 0
        self._plan: Plan | None = None
        self._consumed = 0
        self._clock = self._flushed = time.perf_counter()
        self._rows = _Rows()
        try:
            self._file = TraceWriter(path, about, sizes)
        except OSError as error:
            self._fail(error)

    # --- what happens, in this order ---

    @_harmless
    def begin(self, epoch: int, consumed: int, run: Mapping[str, Any]) -> None:
        """Note that an epoch begins, or resumes after ``consumed`` accesses of all ranks.

        ``run`` is what may change from one run to the next, as JSON has it: ``world_size``.
        """
        self._write()
        self._epoch, self._plan, self._consumed = epoch, None, consumed
        text = json.dumps(dict(run, consumed=consumed, began=time.time()))
        self._rows.begin = np.frombuffer(text.encode(), np.uint8)
        self._write()

    @_harmless
    def prepared(self, plan: Plan | None, ready: bool, volatile: Ids) -> None:
        """Note the plan of all ranks from here on, and what the scorer asked for."""
        self._plan = plan
        self._rows.ready.append(ready)
        self._rows.volatile.append(volatile)

    @_harmless
    def batch(self, meta: ServedBatch, stall_seconds: float) -> None:
        """Note a batch that the training loop gets after waiting so long."""
        now = time.perf_counter()
        if self._rows.num_bytes >= _BLOCK_BYTES or now - self._flushed >= _BLOCK_SECONDS:
            self._write()
        asked = None
        if self._plan is not None:
            asked = self._plan.ids[meta.positions - self._consumed]
        self._rows.add_batch(meta, asked, now - self._clock, stall_seconds)

    @_harmless
    def observed(
        self,
        ids: Ids,
        losses: NDArray[np.float64],
        token: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Note losses ``f64[n]`` that a batch showed; without ``token`` it is not training's."""
        self._enter(epoch)
        self._rows.add_losses(ids, losses, token)

    @_harmless
    def scored(
        self,
        ids: Ids,
        values: NDArray[np.float64],
        neighbours: Neighbours | None,
        is_aside: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Note the scores ``f64[n]`` that samples got; ``is_aside``: not by training."""
        self._enter(epoch)
        self._rows.add_scores(ids, values, neighbours, is_aside)

    @_harmless
    def end(self, accuracy: float | None = None) -> None:
        """Note that the epoch is over, and the accuracy after it if it is known."""
        if accuracy is not None:
            self._rows.accuracy.append(accuracy)
        self._write()

    def close(self) -> None:
        """Write what is left, and close the file; a second call does nothing."""
        self.end()
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- inside ---

    def _enter(self, epoch: int | None) -> None:
        """Write down what belongs to another epoch first."""
        if epoch is not None and epoch != self._epoch:
            self._write()
            self._epoch = epoch

    def _write(self) -> None:
        if self._file is None or self._pid != os.getpid():
            return
        columns = self._rows.columns()
        if columns:
            kind = Kind.BEGIN if "begin" in columns else Kind.ROWS
            self._rows = _Rows()
            self._file.append(kind, self._epoch, columns)
        self._flushed = time.perf_counter()

    def _fail(self, error: Exception) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        warn_caller(f"the trace {str(self._path)!r} ends here, training continues: {error!r}")


class _Rows:
    """The columns of one block; :mod:`stoker.sim.trace` says what they are."""

    def __init__(self) -> None:
        self.begin: NDArray[np.uint8] | None = None
        self.ready: list[bool] = []
        self.volatile: list[Ids] = []
        self.accuracy: list[float] = []
        self.num_bytes = 0
        self._lists: dict[str, list[Any]] = {}
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._batches: dict[int, tuple[int, Ids]] = {}
        self._step: tuple[int, Ids, NDArray[np.float64]] | None = None
        self._steps = self._updates = self._accesses = 0

    def add_batch(self, meta: ServedBatch, asked: Ids | None, now: float, stall: float) -> None:
        self._batches[meta.token] = len(self._batches), meta.ids
        self._append(batch_size=len(meta), position=int(meta.positions[0]), time=now, stall=stall)
        self._extend(ids=meta.ids, outcomes=meta.outcomes)
        if asked is not None:
            other = np.flatnonzero(asked != meta.ids)
            if len(other):
                self._extend(asked_at=(other + self._accesses).astype(np.uint32))
                self._extend(asked=asked[other])
        self._accesses += len(meta)

    def add_losses(self, ids: Ids, losses: NDArray[np.float64], token: int | None) -> None:
        batch, served = self._batches.get(-1 if token is None else token, (-1, None))
        if served is None or not (ids is served or np.array_equal(ids, served)):
            batch = -1
            self._extend(step_ids=ids)
        self._append(step_batch=batch, step_size=len(ids), step_aside=token is None)
        self._extend(losses=_narrow(losses))
        self._step = self._steps, ids, losses
        self._steps += 1

    def add_scores(
        self, ids: Ids, values: NDArray[np.float64], near: Neighbours | None, is_aside: bool
    ) -> None:
        step, shown, losses = self._step or (-1, None, values)
        if ids is not shown:
            step = -1
            self._extend(update_ids=ids)
        is_loss = step >= 0 and np.array_equal(values, losses)
        if not is_loss:
            self._extend(values=_narrow(values))
        self._append(
            update_step=step, update_size=len(ids), update_aside=is_aside, update_is_loss=is_loss
        )
        if near is not None:
            self._append(near_update=self._updates, near_size=len(near.ids))
            self._extend(
                near_ids=near.ids, near_degree=near.degree.astype(np.uint32), near=near.all
            )
        self._updates += 1

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return what there is, by name."""
        found = {name: np.concatenate(parts) for name, parts in self._arrays.items()}
        found |= {name: np.asarray(v, _DTYPES[name]) for name, v in self._lists.items()}
        if self.begin is not None:
            found["begin"] = self.begin
        if self.ready:
            found["ready"] = np.array(self.ready[-1:], np.uint8)
            found["volatile"] = self.volatile[-1]
        if self.accuracy:
            found["accuracy"] = np.array(self.accuracy[-1:])
        return found

    def _append(self, **values: Any) -> None:
        for name, value in values.items():
            self._lists.setdefault(name, []).append(value)
            self.num_bytes += 8

    def _extend(self, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._arrays.setdefault(name, []).append(array)
            self.num_bytes += array.nbytes


_DTYPES: dict[str, Any] = {
    "batch_size": np.uint32,
    "position": np.int64,
    "time": np.float64,
    "stall": np.float32,
    "step_batch": np.int32,
    "step_size": np.uint32,
    "step_aside": np.uint8,
    "update_step": np.int32,
    "update_size": np.uint32,
    "update_aside": np.uint8,
    "update_is_loss": np.uint8,
    "near_update": np.uint32,
    "near_size": np.uint32,
}


def _narrow(values: NDArray[np.float64]) -> NDArray[Any]:
    """Return the values in 32 bits where nothing is lost by it, as with most losses."""
    small = values.astype(np.float32)
    return small if np.array_equal(small, values) else values
