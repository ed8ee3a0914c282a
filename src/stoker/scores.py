"""What training has learned about each sample: one row per sample, in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import stoker._core as core
from stoker.errors import CapacityError, ConfigError
from stoker.shared import SharedArray, scratch

Number = TypeVar("Number", np.uint32, np.int64)
Row = TypeVar("Row", np.float64, np.int32, np.bool_)

MAX_EPOCHS = 4096
"""Epochs whose history a Scores has room for."""

_AT_ONCE = 1 << 16

_ROWS = ("values", "last", "seen", "volatile", "basis")
_HISTORY = ("accuracies", "losses", "deviations", "supplies", "hit_ratios")


class Scores:
    """Score, last step and number of observations of every sample, and a history by epoch.

    The arrays live in shared memory, so a pickled copy in a spawned worker, or a forked child,
    sees the same rows and costs no memory of its own. Written by one process, through
    ``importance``; any process may read. A reader that needs values that do not change
    takes a :meth:`snapshot`. Not locked: a row read while it is written may mix two updates.

    The history (:attr:`accuracies`, :attr:`losses`, :attr:`deviations`, :attr:`supplies`,
    :attr:`hit_ratios`) is there so that what adapts to training, like a sampler's repetition or a
    cache's split, is a pure function of the scores and the epoch.
    """

    def __init__(self, num_samples: int) -> None:
        """Allocate ``num_samples`` rows; ConfigError unless it is a positive integer."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, (int, np.integer)):
            raise ConfigError(f"num_samples={num_samples!r} is not an integer: give one")
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples} is out of range: give at least 1 sample")
        size = (int(num_samples),)
        self._values = SharedArray.create(size, np.float64, name="scores.values")
        self._last = SharedArray.create(size, np.int32, name="scores.last")
        self._seen = SharedArray.create(size, np.int32, name="scores.seen")
        self._volatile = SharedArray.create(size, np.bool_, name="scores.volatile")
        self._basis = SharedArray.create(size, np.float32, name="scores.basis")
        self._basis_epoch = SharedArray.create((), np.int64, name="scores.basis_epoch")
        self._history = SharedArray.create(
            (len(_HISTORY), MAX_EPOCHS), np.float64, name="scores.history"
        )
        self._num_epochs = SharedArray.create((), np.int64, name="scores.num_epochs")
        self._ready = SharedArray.create((), np.bool_, name="scores.ready")
        self._frozen = False
        self._last.array.fill(-1)
        self._basis_epoch.array.fill(-1)
        self._history.array.fill(np.nan)
        self._ready.array.fill(True)

    def __len__(self) -> int:
        return len(self._values.array)

    @property
    def values(self) -> NDArray[np.float64]:
        """f64[N], the latest score; 0 for a sample not seen yet. Read-only view."""
        return _read_only(self._values.array)

    @property
    def last(self) -> NDArray[np.int32]:
        """i32[N], the step of the latest observation; -1 for none. Read-only view."""
        return _read_only(self._last.array)

    @property
    def seen(self) -> NDArray[np.int32]:
        """i32[N], the number of observations. Read-only view."""
        return _read_only(self._seen.array)

    @property
    def volatile(self) -> NDArray[np.bool_]:
        """bool[N], samples whose score a scorer wants fresh in each epoch. Read-only view.

        ImPACT's set S: empty unless a scorer fills it through :meth:`set_volatile`.
        """
        return _read_only(self._volatile.array)

    @property
    def basis(self) -> NDArray[np.float32]:
        """f32[N], what a sampler that draws several epochs at once drew them from; 0 at first.

        Kept by :meth:`set_basis`, so that such plans stay a function of the scores. Read-only view.
        """
        return _read_only(self._basis.array)

    @property
    def basis_epoch(self) -> int:
        """The first of the epochs that were drawn from :attr:`basis`; -1 for none."""
        return int(self._basis_epoch.array)

    @property
    def ready(self) -> bool:
        """False while the scorer asks for full passes, as in ImPACT's warm-up; True at first."""
        return bool(self._ready.array)

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._refuse_frozen("update")
        self._ready.array.fill(bool(ready))

    @property
    def accuracies(self) -> NDArray[np.float64]:
        """f64[E], accuracy at the end of each epoch so far, NaN where not known. Read-only view."""
        return self._epochs("accuracies")

    @property
    def losses(self) -> NDArray[np.float64]:
        """f64[E], mean observed loss of each epoch so far, NaN where not known. Read-only view."""
        return self._epochs("losses")

    @property
    def deviations(self) -> NDArray[np.float64]:
        """f64[E], standard deviation of the scores of seen samples at the end of each epoch.

        NaN where not known. Read-only view.
        """
        return self._epochs("deviations")

    @property
    def supplies(self) -> NDArray[np.float64]:
        """f64[E], samples a second that storage gave in each epoch / those that training took.

        Of training's rate while it did not wait. Where it never waited, only what it asked for is
        known, and storage could have given more. NaN where not known. Read-only view.
        """
        return self._epochs("supplies")

    @property
    def hit_ratios(self) -> NDArray[np.float64]:
        """f64[E], hits / accesses of each epoch so far, NaN where not known. Read-only view."""
        return self._epochs("hit_ratios")

    def record_epoch(
        self,
        epoch: int,
        *,
        accuracy: float | None = None,
        loss: float | None = None,
        supply: float | None = None,
        hit_ratio: float | None = None,
    ) -> None:
        """Write what is known at the end of ``epoch``, and the deviation of the scores now.

        What is None or not finite leaves an earlier record of that epoch as it was. Raises
        ConfigError for a negative epoch or a snapshot, CapacityError from epoch
        :data:`MAX_EPOCHS` on.
        """
        self._refuse_frozen("update")
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} is out of range: epochs count from 0")
        if epoch >= MAX_EPOCHS:
            raise CapacityError(
                f"epoch={epoch} is beyond the history of {MAX_EPOCHS} epochs that Scores keep"
            )
        known = (accuracy, loss, self._deviation(), supply, hit_ratio)
        for row, value in zip(self._history.array, known, strict=True):
            if value is not None and np.isfinite(value):
                row[epoch] = value
        self._num_epochs.array.fill(max(int(self._num_epochs.array), epoch + 1))

    def set_volatile(self, ids: ArrayLike) -> None:
        """Make u32[m] ``ids`` the volatile samples, and only those.

        Raises ConfigError, and changes nothing, for ids out of range or a snapshot.
        """
        self._refuse_frozen("update")
        rows = self._rows(ids)
        self._volatile.array.fill(False)
        self._volatile.array[rows] = True

    def set_basis(self, values: ArrayLike, epoch: int) -> None:
        """Keep f64[N] ``values`` as what the epochs from ``epoch`` on are drawn from.

        Raises ConfigError, and changes nothing, for another length, values that are not finite in
        32 bits, or a snapshot.
        """
        self._refuse_frozen("update")
        with np.errstate(over="ignore"):
            given = np.asarray(values).astype(np.float32)
        if given.shape != (len(self),) or not np.isfinite(given).all():
            raise ConfigError(f"values have shape {given.shape}: give {len(self)} finite numbers")
        self._basis.array[:] = given
        self._basis_epoch.array.fill(epoch)

    def update(self, ids: ArrayLike, values: ArrayLike, step: ArrayLike) -> None:
        """Store f64[n] ``values`` for u32[n] ``ids``, observed at ``step``: of all, or i32[n].

        An id that comes twice counts twice and keeps its later value. Raises ConfigError, and
        changes nothing, for ids out of range, lengths that differ, values that are not finite,
        or a snapshot.
        """
        self._refuse_frozen("update")
        rows, new = self._rows(ids, in_range=False), np.asarray(values, dtype=np.float64)
        steps = np.asarray(step, dtype=np.int32)
        if new.shape != rows.shape or steps.shape not in ((), rows.shape):
            raise ConfigError(
                f"{new.shape} values, {steps.shape} steps for {rows.shape} ids: give one for each"
            )
        table = self._values.array, self._last.array, self._seen.array
        core.write_scores(*table, rows, new, steps.reshape(-1))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of everything, for a checkpoint; :meth:`restore` takes them by name.

        ``values f64[N]``, ``last i32[N]``, ``seen i32[N]``, ``volatile bool[N]``, ``accuracies``,
        ``losses``, ``deviations``, ``supplies`` and ``hit_ratios f64[E]``, ``ready bool[]``,
        ``basis f32[N]``, ``basis_epoch i64[]``.
        """
        names = (*_ROWS, *_HISTORY)
        return {
            **{name: getattr(self, name).copy() for name in names},
            "ready": self._ready.array.copy(),
            "basis_epoch": self._basis_epoch.array.copy(),
        }

    def restore(
        self,
        values: ArrayLike,
        last: ArrayLike,
        seen: ArrayLike,
        volatile: ArrayLike | None = None,
        accuracies: ArrayLike = (),
        losses: ArrayLike = (),
        deviations: ArrayLike = (),
        supplies: ArrayLike | None = None,
        hit_ratios: ArrayLike | None = None,
        ready: ArrayLike = True,
        basis: ArrayLike | None = None,
        basis_epoch: ArrayLike = -1,
    ) -> None:
        """Replace everything with what :meth:`arrays` of an earlier run returned.

        Raises ConfigError, and changes nothing, for other lengths, values that are not finite,
        or a snapshot.
        """
        self._refuse_frozen("restore")
        if volatile is None:
            volatile = np.zeros(len(self), np.bool_)
        if basis is None:
            basis, basis_epoch = np.zeros(len(self), np.float32), -1
        rows = [np.asarray(given) for given in (values, last, seen, volatile, basis)]
        for row in rows:
            if row.shape != (len(self),) or not np.isfinite(row).all():
                raise ConfigError(f"rows have shape {row.shape}: give {len(self)} finite numbers")
        unknown = np.full(np.shape(accuracies), np.nan)
        history = [
            np.asarray(unknown if given is None else given, np.float64)
            for given in (accuracies, losses, deviations, supplies, hit_ratios)
        ]
        lengths = {row.shape for row in history}
        if len(lengths) != 1 or history[0].ndim != 1 or len(history[0]) > MAX_EPOCHS:
            raise ConfigError(
                f"histories have shape {sorted(lengths)}: give one number for each of "
                f"at most {MAX_EPOCHS} epochs"
            )
        for name, row in zip(_ROWS, rows, strict=True):
            self._array(name)[:] = row
        self._history.array.fill(np.nan)
        self._history.array[:, : len(history[0])] = history
        self._num_epochs.array.fill(len(history[0]))
        self._ready.array.fill(bool(np.asarray(ready)))
        self._basis_epoch.array.fill(int(np.asarray(basis_epoch)))

    def snapshot(self) -> Self:
        """Return an independent read-only copy; plans are made from one."""
        copy = type(self).__new__(type(self))
        for name, shared in vars(self).items():
            if isinstance(shared, SharedArray):
                setattr(copy, name, SharedArray.copy_of(shared.array))
        copy._frozen = True
        return copy

    def _deviation(self) -> float | None:
        """Return the standard deviation of the scores of seen samples; None if there are none."""
        count = int(np.count_nonzero(self._seen.array))
        if not count:
            return None
        mean = sum(float(part.sum()) for part in self._seen_parts()) / count
        squares = sum(float(np.square(part - mean).sum()) for part in self._seen_parts())
        return float(np.sqrt(squares / count))

    def _seen_parts(self) -> Iterator[NDArray[np.float64]]:
        """Yield the scores of seen samples, some at a time: there may be 100 million."""
        for at in range(0, len(self), _AT_ONCE):
            values = self._values.array[at : at + _AT_ONCE]
            seen = self._seen.array[at : at + _AT_ONCE]
            yield values if seen.all() else values[seen > 0]

    def _array(self, name: str) -> NDArray[Any]:
        memory: SharedArray = getattr(self, f"_{name}")
        return memory.array

    def _epochs(self, name: str) -> NDArray[np.float64]:
        known = int(self._num_epochs.array)
        row: NDArray[np.float64] = self._history.array[_HISTORY.index(name), :known]
        return _read_only(row)

    def _refuse_frozen(self, what: str) -> None:
        if self._frozen:
            raise ConfigError(f"this is a snapshot of scores: {what} the Scores it was taken from")

    def _rows(self, ids: ArrayLike, *, in_range: bool = True) -> NDArray[np.uint32]:
        """Return u32[n] ``ids``; if not ``in_range``, what takes them still has to check that."""
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"ids have shape {given.shape}, {given.dtype}: give u32[n]")
        is_checked = given.dtype == np.uint32 and not in_range
        if given.size and not is_checked and not 0 <= given.min() <= given.max() < len(self):
            wrong = given[(given < 0) | (given >= len(self))][0]
            raise ConfigError(f"id {wrong} is out of range: give ids from 0 to {len(self) - 1}")
        return np.ascontiguousarray(given, np.uint32)


def counts_up_to(values: ArrayLike) -> NDArray[np.uint32]:
    """Return u32[n]: how many of f64[n] ``values`` are at most the own one. No value is NaN.

    Divided by n, the empirical distribution function at each value, its percentile.
    """
    given = np.ascontiguousarray(values, dtype=np.float64)
    counts: NDArray[np.uint32] = scratch(len(given), np.uint32)
    core.count_up_to(given, scratch(len(given), np.uint32), counts)
    return counts


def least_of_largest(
    values: NDArray[np.float64], chosen: NDArray[np.bool_], count: int
) -> tuple[float, int]:
    """Return the least of the ``count`` largest of the ``chosen`` (``bool[n]``) of f64[n] values.

    And how many of these are above it. Infinity where there are none to be. No chosen one is NaN.
    """
    found: tuple[float, int] = core.least_of_largest(values, chosen, count)
    return found


def distinct(ids: NDArray[Number]) -> NDArray[Number]:
    """Return integers [m], each of ``ids`` [n] once, ascending.

    As ``np.unique``, which hashes: of a batch that takes five times as long, of ``u32`` ten times.
    """
    found: NDArray[Number]
    if ids.dtype == np.uint32:
        found = core.distinct(ids)
        return found
    ascending = np.sort(ids)
    is_first = np.ones(len(ids), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    found = ascending[is_first]
    return found


def _read_only(array: NDArray[Row]) -> NDArray[Row]:
    view = array.view()
    view.flags.writeable = False
    return view
