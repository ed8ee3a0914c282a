"""Every sample equally often: once an epoch, or R times in R epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import annealed_from, generator
from stoker.sampler.windows import Windows
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
    """Each sample exactly ``repeat`` times in as many epochs, within a window that slides.

    A cache reads a sample once and serves its other visits, as far as these are close enough: they
    fall at equal distances, R of them in ``window`` epochs, and are shuffled among those close by.
    At any moment a share L/R of the samples is in the middle of its window: a cache that has room
    for them reads each once in R epochs. The samples ``static`` come once in each epoch instead,
    and are worth a place in the cache for good.

    Each sample is visited equally often in a super-epoch, so gradients are unbiased without
    weights. Within an epoch, :attr:`apart` accesses or more lie between two visits of a sample.
    Samples begin their windows in a random order, a new one in each super-epoch, but for the last
    of them: their windows reach into the next super-epoch, so that they are the last in each.

    Epochs are as long as the uniform sampler's. The last super-epoch is as short as what is left
    of the training, and ends with each sample visited exactly once an epoch of it. With one epoch
    left, or ``repeat=1``, this is the uniform sampler. Where the number of samples is no multiple
    of ``pad_to``, each epoch is padded to one, or cut with ``drop_last``, so that a few samples
    come more often, or less. Frozen and pure: safe in any thread or process. Source: Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` for what :class:`UniformSampler` refuses, a
    ``repeat`` or ``epochs`` below 1, a negative ``warm_up``, and shares and windows out of range.
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
    window: float = 1.0
    """L: epochs that R visits of a sample take, above 0. More than R counts as R."""
    static: NDArray[np.uint32] | None = field(default=None, compare=False, repr=False)
    """``u32[S]``, distinct samples that come once in each epoch; None: none."""

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
        if not 0 < self.window < math.inf:
            raise ConfigError(f"window={self.window} is out of range: give epochs, above 0")

    @property
    def apart(self) -> int | None:
        """Least accesses from a visit of a sample to its next one in the same epoch."""
        if self.repeat == 1 or not self.shuffle:
            return None
        mixed = self.num_samples - (0 if self.static is None else len(self.static))
        if not mixed:
            return None
        share = self.window / self.repeat
        super_epochs = range(2, self.repeat + 1)  # the last one may be short
        return min(Windows.of(mixed, epochs, share).apart for epochs in super_epochs)

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0; ``scores`` are not looked at.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch.
        """
        begin, epochs = self._super_epoch(epoch)
        if epochs == 1:
            return super().plan(scores, epoch)
        own = self._visits(begin, epochs, epoch)
        ids = SharedArray.create(self.longest, np.uint32, name="plan.ids")
        ids.array[:] = repeated(own, self.longest)
        return Plan(epoch, epoch * self.longest, ids, repeats=True)  # type: ignore[arg-type]

    def began(self, epoch: int) -> int:
        """Return the epoch with which the super-epoch of ``epoch`` begins."""
        return self._super_epoch(epoch)[0]

    def _visits(self, begin: int, epochs: int, epoch: int) -> NDArray[np.uint32]:
        """Return u32[N], the visits of an epoch of the super-epoch that starts at ``begin``."""
        is_mixed = np.ones(self.num_samples, np.bool_)
        if self.static is not None:
            is_mixed[self.static] = False
        mixed = np.flatnonzero(is_mixed).astype(np.uint32)
        if not len(mixed):
            return super().plan(None, epoch).ids[: self.num_samples]
        windows = Windows.of(len(mixed), epochs, self.window / self.repeat)
        # The same samples are last in each super-epoch, so that windows continue in the next.
        generator(self.seed, 0, stream=4).shuffle(mixed)
        generator(self.seed, begin, stream=2).shuffle(mixed[: len(mixed) - windows.crossing])
        visits = mixed[windows.visits(epoch - begin, self.seed, begin)]
        if self.static is None:
            return visits
        own = np.empty(self.num_samples, np.uint32)
        rng = generator(self.seed, epoch, stream=5)
        rng.shuffle(is_mixed)  # from here on: which accesses are theirs
        own[is_mixed] = visits
        own[~is_mixed] = rng.permutation(self.static)
        return own

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
