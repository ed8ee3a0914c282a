"""Each sample once an epoch, in a seeded random order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.rng import generator
from stoker.scores import Scores
from stoker.shared import SharedArray

MAX_SAMPLES = 2**32 - 1
"""Ids are 32 bits."""


@dataclass(frozen=True)
class UniformSampler(Sampler):
    """A uniform permutation of all samples, a new one for each epoch.

    The order comes from the counter-based generator Philox keyed by (seed, epoch), so any epoch
    is made without making those before it. Frozen and pure: safe in any thread or process.

    Raises :class:`~stoker.errors.ConfigError` for fewer than one sample, a seed that is not an
    unsigned 64-bit number, ``pad_to`` below 1, or ``drop_last`` that would leave nothing.
    """

    uses_scores: ClassVar[bool] = False

    num_samples: int
    """N: ids are 0 to N-1."""
    seed: int = 0
    """Unsigned 64 bits; with the epoch it decides the order."""
    shuffle: bool = True
    """False: ids in order, the same every epoch, never padded (for validation)."""
    pad_to: int = 1
    """Number of ranks: the length of a shuffled plan is a multiple of it, filled up with the
    start of the permutation as torch's DistributedSampler does."""
    drop_last: bool = False
    """Cut the rest off instead of filling up."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ConfigError(f"num_samples={self.num_samples} is refused: 1 to {MAX_SAMPLES}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} is refused: give 0 to 2**64 - 1")
        if self.pad_to < 1:
            raise ConfigError(f"pad_to={self.pad_to} is refused: give the number of ranks, from 1")
        if not self.longest:
            raise ConfigError(
                f"drop_last leaves none of {self.num_samples} samples to {self.pad_to} ranks: "
                "use fewer ranks or drop_last=False"
            )

    @property
    def longest(self) -> int:
        """Accesses of every plan, for all ranks together."""
        rest = self.num_samples % self.pad_to
        if self.drop_last:
            return self.num_samples - rest
        return self.num_samples + (self.pad_to - rest if self.shuffle and rest else 0)

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return :attr:`longest`: every epoch has the same length."""
        return self.longest

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        rng = generator(self.seed, epoch)
        order = np.arange(self.num_samples, dtype=np.uint32)
        if self.shuffle:
            rng.shuffle(order)
        ids = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        ids.array[:] = repeated(order, self.longest)
        return Plan(epoch, epoch * self.longest, ids)  # type: ignore[arg-type]


def repeated(given: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the first ``length`` of ``given``, as if it were repeated without end."""
    # np.resize repeats from the start, also when there are more ranks than accesses.
    return given[:length] if length <= len(given) else np.resize(given, length)
