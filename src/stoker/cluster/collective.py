"""What the ranks of a job can say to each other."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class Collective(Protocol):
    """The ranks of a job; each must call :meth:`gather` as often as the others."""

    rank: int
    world_size: int

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays ``[n]`` that the ranks gave, by rank; of one dtype, of any lengths.

        Raises :class:`~stoker.errors.RanksUnavailable` when one of them does not answer.
        """
        ...


class Alone:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def gather(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the array by itself."""
        return [rows]
