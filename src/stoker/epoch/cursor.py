"""How far the training loop is."""

from __future__ import annotations

from typing import NamedTuple


class Cursor(NamedTuple):
    """A place in training: an epoch, and how much of it the training loops of all ranks had.

    All ranks have handed out the same number of batches at a step, so what they had together is
    always the beginning of the global plan, and any number of ranks can resume from there.
    """

    epoch: int = 0
    consumed: int = 0
    """Samples handed out in the epoch, over all ranks."""
    steps: int = 0
    """Batches that each rank has handed out in it."""


class Walk:
    """The way of one rank's training loop through an epoch; a batch handed out is a step.

    ``start`` is where it begins, ``stride`` how many samples a step takes over all ranks, and
    ``end`` where the plan ends. With ``stride=None`` a step takes ``world_size`` times what this
    rank got.
    """

    def __init__(self, start: Cursor, stride: int | None, end: int | None, world_size: int) -> None:
        self.start = start
        self._stride = stride
        self._end = end
        self._world_size = world_size
        self._cursor = start

    @property
    def cursor(self) -> Cursor:
        """Where the training loop is now."""
        return self._cursor

    def step(self, samples: int) -> None:
        """Count a batch of so many samples that the training loop got."""
        # The stride, not this rank's samples: the last batch of another rank may be longer.
        taken = self._stride or samples * self._world_size
        consumed = self._cursor.consumed + taken
        if self._end is not None:
            consumed = min(consumed, self._end)
        self._cursor = Cursor(self.start.epoch, consumed, self._cursor.steps + 1)
