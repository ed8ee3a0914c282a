"""Which data-parallel rank this process is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from stoker.errors import ConfigError


class Ranks(NamedTuple):
    """The place of a process among the data-parallel processes of the job."""

    rank: int
    world_size: int


Agree = Callable[[str, Ranks], str | None]
"""Returns the text that rank 0 gave, on all ranks; None where they cannot ask each other."""


def alone(text: str, ranks: Ranks) -> str | None:
    """Return the text of a single rank; None for several: an :data:`Agree` without a network."""
    return text if ranks.world_size == 1 else None


class LazyRanks:
    """The ranks that the caller gave, or else what ``find`` returns at the first iteration.

    A framework may start its processes' communication after a loader is made. Raises ConfigError
    as :func:`checked_ranks` does.
    """

    def __init__(self, rank: int | None, world_size: int | None, find: Callable[[], Ranks]) -> None:
        self._fixed = checked_ranks(rank, world_size)
        self._find = find

    def now(self) -> Ranks:
        """Return the ranks as far as they can be known now."""
        return self._fixed or self._find()

    def fix(self) -> Ranks:
        """Return the ranks, which from now on stay as they are."""
        self._fixed = self.now()
        return self._fixed


def checked_ranks(rank: int | None, world_size: int | None) -> Ranks | None:
    """Return what the caller gave, or None when it is to be found out later.

    Raises :class:`~stoker.errors.ConfigError` unless both or neither are given and
    ``0 <= rank < world_size``.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ConfigError(f"rank={rank!r} and world_size={world_size!r}: give both or neither")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: use 1 or more processes")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} is out of range: with world_size={world_size} use 0..{world_size - 1}"
        )
    return Ranks(rank, world_size)


def launched_ranks() -> Ranks:
    """Return what torchrun or srun set in the environment, else a single process.

    Raises :class:`~stoker.errors.ConfigError` for values that are no rank.
    """
    for names in _TORCHRUN, _SLURM:
        if not os.environ.keys() >= set(names):
            continue
        where = {name: os.environ[name] for name in names}
        try:
            given = checked_ranks(*(int(value) for value in where.values()))
        except ValueError as error:
            raise ConfigError(f"the environment says {where}, which is no rank: {error}") from error
        return given or Ranks(0, 1)
    return Ranks(0, 1)


_TORCHRUN = ("RANK", "WORLD_SIZE")
# Of the step that srun started: a batch script has SLURM_NTASKS too, and is one process.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def is_first_on_node(ranks: Ranks) -> bool:
    """Whether this rank does what has to be done once per machine, by torchrun or srun."""
    if "LOCAL_RANK" in os.environ:
        return os.environ["LOCAL_RANK"] == "0"
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(ranks.world_size):
        return os.environ.get("SLURM_LOCALID", "0") == "0"
    return ranks.rank == 0
