"""What was really served in the current epoch: on whose turn, and where in its plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

import stoker._core as core
from stoker.errors import SourceError
from stoker.shared import SharedArray
from stoker.store.registry import Layout, SharedArrays
from stoker.store.tier import Ids, Mask

NOBODY = 2**32 - 1
"""In the place of a sample: it is not known which was served."""

_POLL = 0.002  # seconds between two looks at what other processes note


class Turns(NamedTuple):
    """Which accesses of which epoch a batch of ``n`` makes."""

    stamp: int
    """:attr:`Claims.stamp` when the batch was asked for; 0: the accesses are none of an epoch's."""
    positions: NDArray[np.int64]
    """``i64[n]``, positions in the epoch's plan of the whole job."""


ASIDE = Turns(0, np.empty(0, np.int64))
"""Accesses that are none of the epoch's: what is asked for is served, and not recorded."""


class Claims:
    """Which samples were served in this epoch, by all workers and ranks of a job on one node.

    The one record that substitutes, reads past the cache and saved states use. ``arrays`` are
    those of :meth:`layout`, zeros at first:

    - ``served`` (``u32[N]``): the stamp of the latest epoch in which a sample was served, set by
      compare-and-swap, so that of all processes one gets a sample.
    - ``displaced`` (``u64[N]``): the stamp, times 2**32, plus the sample on whose turn it was
      served: its own, or that of the one displaced.
    - ``log`` (``u64[A]``): for each position of the plan the stamp, times 2**32, plus the sample
      served there.

    A process has its own, over shared arrays; its forked children and processes that receive it
    use the same epoch. A batch that was asked for in an earlier epoch, and is served late,
    claims nothing. Safe in any thread.
    """

    def __init__(self, arrays: SharedArrays) -> None:
        self.is_shared = arrays.shared
        """Whether other processes can find the arrays."""
        self.served = arrays["served"]
        self._displaced, self._log = arrays["displaced"], arrays["log"]
        self._epoch = SharedArray.create(2, np.uint64, name="stoker-epoch")

    @staticmethod
    def layout(num_samples: int, accesses: int) -> Layout:
        """Return the arrays for so many samples, and accesses of all ranks in the longest epoch."""
        return {
            "served": (num_samples, "u4"),
            "displaced": (num_samples, "u8"),
            "log": (accesses, "u8"),
        }

    @property
    def stamp(self) -> int:
        """The stamp of samples served in this epoch; 0 before the first.

        The epoch plus 1, or more when an epoch was begun again.
        """
        return int(self._epoch.array[0])

    @property
    def rank_seed(self) -> int:
        """What makes the choices of ranks differ."""
        return int(self._epoch.array[1])

    def begin(self, epoch: int, rank_seed: int, earlier: Ids) -> None:
        """Begin ``epoch``, of which ``earlier`` (``u32[n]``) were served before, or elsewhere.

        What was claimed before and is not among them may be served again.
        """
        stamp = max(epoch + 1, self.stamp + 1)
        core.mark_once(self.served.array, earlier, stamp)
        self.note_turns(earlier, earlier, stamp)
        self._epoch.array[:] = stamp, rank_seed % 2**32

    def holds(self, turns: Turns | None) -> bool:
        """Whether samples are to be claimed for these accesses; None: some of this epoch's."""
        stamp = self.stamp
        return stamp > 0 and (turns is None or turns.stamp == stamp)

    def claim(self, ids: Ids, stamp: int) -> Mask:
        """Mark ``ids`` as served, and return which were not served before."""
        first: Mask = core.mark_once(self.served.array, ids, stamp)
        return first

    def are_free(self, ids: Ids, stamp: int) -> Mask:
        """Return which of ``ids`` no process has served."""
        free: Mask = self.served.array.take(ids) < stamp
        return free

    def note_turns(self, ids: Ids, turns: Ids, stamp: int) -> None:
        """Note on whose turns ``ids`` were claimed, both ``u32[n]``."""
        self._displaced.array[ids] = _stamped(turns, stamp)

    def take_turns(self, ids: Ids, stamp: int) -> tuple[Ids, Mask]:
        """Return who is served on the turns of ``ids``, which were served already, and is marked.

        That is the one at the end of the chain of displaced samples, ``u32[n]``, if it has had no
        turn, else the sample again. ``bool[n]``: False where another process has not said yet whom
        it displaced.
        """
        marks, displaced = self.served.array, self._displaced.array
        return core.take_turns(marks, displaced, ids, stamp)

    def log(self, turns: Turns, ids: Ids) -> None:
        """Note what the accesses were served: ``ids``, ``u32[n]``."""
        if self.holds(turns):
            self._log.array[turns.positions] = _stamped(ids, turns.stamp)

    def logged(self, first: int, end: int, patience: float) -> Ids:
        """Return what the accesses ``first`` to ``end`` of this epoch were served, ``u32[n]``.

        Waits ``patience`` seconds at most for what other processes are about to serve;
        :data:`NOBODY` where that is not known then.
        """
        deadline = time.monotonic() + patience
        while True:
            entries = self._log.array[first:end].copy()
            known = entries >> np.uint64(32) == self.stamp
            if known.all() or time.monotonic() >= deadline:
                return np.where(known, entries, NOBODY).astype(np.uint32)
            time.sleep(_POLL)


def still_due(planned: Ids, consumed: int, served: ArrayLike) -> NDArray[np.int64]:
    """Return the accesses of a plan that are left after ``consumed`` of them.

    ``planned`` (``u32[A]``) is the plan and ``served`` (integers ``[consumed]``) what was really
    served; :data:`NOBODY` counts as nothing. The result, ``i64[A - consumed]``, names positions of
    the plan: those that come anyway, in order, but in the place of a sample that was served in
    advance one that it displaced. So what was served and what is left are together the plan, as
    far as samples that are not in it were not served instead.
    """
    ids = np.asarray(served, np.uint32)
    ids = ids[ids != NOBODY]
    size = int(max(planned.max(initial=0), ids.max(initial=0))) + 1
    due = np.bincount(planned, minlength=size) - np.bincount(ids, minlength=size)
    rest = np.arange(consumed, len(planned))
    comes = _nth(planned[consumed:]) < due[planned[consumed:]]
    due -= np.bincount(planned[consumed:][comes], minlength=size)
    displaced = np.flatnonzero(_nth(planned[:consumed]) < due[planned[:consumed]])
    taken = np.flatnonzero(~comes)
    rest[taken] = displaced[: len(taken)]
    return rest


def _nth(ids: Ids) -> NDArray[np.int64]:
    """Return i64[n], how many equal ids come before each."""
    order = np.argsort(ids, kind="stable")
    begins = np.r_[True, ids[order][1:] != ids[order][:-1]][: len(ids)]
    index = np.arange(len(ids))
    nth = np.empty(len(ids), np.int64)
    nth[order] = index - np.maximum.accumulate(np.where(begins, index, 0)) if len(ids) else index
    return nth


def _stamped(ids: Ids, stamp: int) -> NDArray[np.uint64]:
    return np.uint64(stamp << 32) | ids.astype(np.uint64)


@dataclass(frozen=True, eq=False, slots=True)
class Served:
    """``n`` samples in the order in which they were asked for.

    ``len(served)`` is ``n``, and ``served[i]`` is the ``i``-th sample, ``u8[length]``, a view.
    """

    ids: NDArray[np.uint32]
    """``u32[n]``, the samples really served."""
    data: NDArray[np.uint8]
    """``u8[total]``, the samples one after the other."""
    offsets: NDArray[np.int64]
    """``i64[n + 1]``: sample ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    errors: dict[int, SourceError] = field(default_factory=dict)
    """Index in the batch -> why that sample could not be read; it then has zero length."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if not 0 <= index < len(self.ids):
            raise IndexError(f"sample {index} of a batch of {len(self.ids)}")
        return self.data[self.offsets[index] : self.offsets[index + 1]]
