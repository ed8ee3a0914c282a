"""Every sample equally often: once an epoch, or R times in R epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import annealed_from, generator
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
            raise ConfigError(
                f"num_samples={self.num_samples} is out of range: give 1 to {MAX_SAMPLES}"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} is out of range: give 0 to 2**64 - 1")
        if self.pad_to < 1:
            raise ConfigError(
                f"pad_to={self.pad_to} is out of range: give the number of ranks, from 1"
            )
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


@dataclass(frozen=True)
class SuperEpochSampler(UniformSampler):
    """A uniform permutation of ``repeat`` copies of all samples, cut into as many epochs.

    Each sample is visited exactly ``repeat`` times in a super-epoch, so gradients are unbiased and
    need no weights, while a share of the accesses, (1 - 1/R)^R, repeats one of the same epoch: hits
    that no cache can have when each sample is visited once an epoch. With a ``group`` below 1 only
    the visits of so many samples are mixed with one another, at random which: as their working set
    is smaller, a cache serves more of them, and an epoch sees fewer samples. Epochs are as long as
    the uniform sampler's. The last super-epoch is as short as what is left of the training, and
    ends with each sample visited exactly once an epoch of it. With one epoch left, or ``repeat=1``,
    this is the uniform sampler. Where the number of samples is no multiple of ``pad_to``, each
    epoch is padded to one, or cut with ``drop_last``, so that a few samples come more often, or
    less. Frozen and pure: safe in any thread or process.

    Raises :class:`~stoker.errors.ConfigError` for what :class:`UniformSampler` refuses, a
    ``repeat`` or ``epochs`` below 1, a negative ``warm_up``, and shares out of range.
    """

    repeat: int = 2
    """R: epochs in a super-epoch, and visits of each sample in it."""
    epochs: int | None = None
    """Epochs of the whole training; None when not known, and then there is no annealed end."""
    annealed: float = 0.125
    """Share of the training, at its end, with each sample once an epoch, 0 to 1. Rounded up to
    whole epochs: without it the samples visited last are unlike those visited long ago."""
    warm_up: int = 0
    """Epochs at the start with each sample once, before the first super-epoch."""
    group: float = 1.0
    """Share of the samples whose visits are mixed with one another, above 0 to 1. All visits of a
    super-epoch to the samples of a group come before those to the next group. Their order is
    random: of b accesses in a row to a group of n samples some b^2 (1 - 1/R) / 2n are repeats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} is out of range: give 1 epoch or more")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} is out of range: give at least 1, or None")
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up} is out of range: give 0 epochs or more")
        if not 0 <= self.annealed <= 1:
            raise ConfigError(f"annealed={self.annealed} is out of range: give a share from 0 to 1")
        if not 0 < self.group <= 1:
            raise ConfigError(f"group={self.group} is out of range: give a share above 0, up to 1")

    @property
    def mixed(self) -> int:
        """Samples whose visits are mixed with one another, 1 or more."""
        return max(1, round(self.group * self.num_samples))

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        begin, epochs = self._super_epoch(epoch)
        if epochs == 1:
            return super().plan(scores, epoch)
        own = self._visits(begin, epochs)[(epoch - begin) * self.num_samples :][: self.num_samples]
        ids = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        ids.array[:] = repeated(own, self.longest)
        return Plan(epoch, epoch * self.longest, ids)  # type: ignore[arg-type]

    def began(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self._super_epoch(epoch)[0]

    def _visits(self, begin: int, epochs: int) -> NDArray[np.uint32]:
        """Return u32[N x epochs], the visits of a super-epoch, in order."""
        rng = generator(self.seed, begin, stream=2)
        order = np.arange(self.num_samples, dtype=np.uint32)
        rng.shuffle(order)
        order = np.repeat(order, epochs)
        length = self.mixed * epochs
        for start in range(0, len(order), length):
            rng.shuffle(order[start : start + length])
        return order

    def _super_epoch(self, epoch: int) -> tuple[int, int]:
        """Return where the super-epoch of ``epoch`` begins, and how many epochs it has."""
        if epoch < 0 or not self.shuffle:
            return epoch, 1
        return super_epoch(epoch, self.repeat, self.epochs, self.annealed, self.warm_up)


def super_epoch(
    epoch: int, repeat: int, epochs: int | None, annealed: float, warm_up: int
) -> tuple[int, int]:
    """Return where the super-epoch of ``epoch`` begins, and how many epochs it has.

    They have ``repeat`` each, the last one what is left before the annealed end of a training of
    ``epochs``. The epochs of that end, and of the warm-up, stand alone.
    """
    if epoch < warm_up:
        return epoch, 1
    begin = epoch - (epoch - warm_up) % repeat
    if epochs is None:
        return begin, repeat
    mixed = annealed_from(epochs, annealed)
    if epoch >= mixed:
        return epoch, 1
    return begin, min(repeat, mixed - begin)
