"""Uniform full passes, and the base of samplers that make them until there are scores to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.sampler.base import Sampler
from stoker.sampler.draws import generator, permutation
from stoker.scores import Scores
from stoker.shared import SharedArray, in_parts

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
        if self.shuffle:
            ids: Any = _made_as_long(permutation(self.num_samples, rng), self.longest)
        else:
            ids = repeated(np.arange(self.num_samples, dtype=np.uint32), self.longest)
        return Plan(epoch, epoch * self.longest, ids)


def repeated(given: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the first ``length`` of ``given``, as if it were repeated without end."""
    # np.resize repeats from the start, also when there are more ranks than accesses.
    return given[:length] if length <= len(given) else np.resize(given, length)


def _made_as_long(given: NDArray[Any] | SharedArray, length: int) -> Any:
    if not isinstance(given, SharedArray):
        return repeated(given, length)
    return given if len(given.array) == length else repeated(given.array, length)


class Draw(NamedTuple):
    """The accesses of one epoch, before they are made to divide among ranks."""

    ids: NDArray[np.integer] | SharedArray
    """[n], in the order of the epoch. What is shared, the plan has as it is, without a copy."""
    weights: NDArray[np.floating] | SharedArray | None = None
    """f[n], of each access in the loss; None when all are one."""
    beyond: NDArray[np.float32] | SharedArray | None = None
    """f32[N], the :func:`expected` accesses until the next one of each sample, at the visits of an
    epoch like this one; None when not known."""


@dataclass(frozen=True)
class EpochSampler(Sampler):
    """Base of samplers that follow scores: a subclass says what is drawn, and how much.

    Until there is something to go by it makes uniform full passes, as :class:`UniformSampler`
    does: without scores, with none seen yet, or while their scorer is not ready. The length of a
    draw is made a multiple of the ranks by repeating its start, or cut with ``drop_last`` as long
    as that leaves something. Frozen and pure: safe in any thread or process.

    Raises :class:`~stoker.errors.ConfigError` for what :class:`UniformSampler` refuses, and for
    ``epochs`` below 1.
    """

    uses_scores: ClassVar[bool] = True

    num_samples: int
    """N: ids are 0 to N-1."""
    seed: int = 0
    """Unsigned 64 bits; with the epoch and the scores it decides the draw."""
    shuffle: bool = True
    """False: every epoch is a full pass in order, never padded (for validation)."""
    pad_to: int = 1
    """Number of ranks: the length of a shuffled plan is a multiple of it."""
    drop_last: bool = False
    """Cut the rest off instead of filling up."""
    epochs: int | None = None
    """Epochs of the whole training; None when not known."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} is out of range: give at least 1, or None")
        self._full_pass()

    # --- what a subclass says ---

    def is_full(self, epoch: int) -> bool:
        """Whether ``epoch`` is a full pass whatever the scores."""
        return False

    def size(self, scores: Scores | None) -> int:
        """Return the accesses of a draw; without scores, the number to plan a schedule by."""
        return self.num_samples

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return :meth:`size` accesses for ``epoch``; ``rng`` is this epoch's own."""
        raise NotImplementedError

    # --- the protocol ---

    @property
    def longest(self) -> int:
        """Accesses of the longest plan, for all ranks together: a full pass."""
        return self._full_pass().longest

    def length_at(self, epoch: int, scores: Scores | None = None) -> int:
        """Return the accesses of the plan of ``epoch``, for all ranks together.

        Without scores: as if there were some to draw by, for a learning-rate schedule.
        """
        if self._draws_at(epoch) and (scores is None or has_evidence(scores)):
            return self._divisible(self.size(scores))
        return self._full_pass().longest

    def plan(self, scores: Scores | None, epoch: int) -> Plan:
        """Return the plan of ``epoch``, from 0, by a snapshot of the scores.

        Raises :class:`~stoker.errors.ConfigError` for a negative epoch, or scores of another
        number of samples.
        """
        if scores is not None and len(scores) != self.num_samples:
            raise ConfigError(f"{len(scores)} scores for {self.num_samples} samples: give one each")
        if scores is None or not has_evidence(scores) or not self._draws_at(epoch):
            return self._full_pass().plan(None, epoch).starting_at(epoch * self.longest)
        ids, weights, beyond = self.draw(scores, epoch, generator(self.seed, epoch, stream=1))
        length = self._divisible(len(ids.array if isinstance(ids, SharedArray) else ids))
        return Plan(
            epoch,
            epoch * self.longest,
            _made_as_long(ids, length),
            None if weights is None else _made_as_long(weights, length),
            beyond=beyond,  # type: ignore[arg-type]
        )

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether ``epoch`` is a full pass whatever is scored until it begins."""
        return not self.uses_scores or not self._draws_at(epoch)

    # --- inside ---

    def _full_pass(self) -> UniformSampler:
        return UniformSampler(
            self.num_samples, self.seed, self.shuffle, self.pad_to, self.drop_last
        )

    def _draws_at(self, epoch: int) -> bool:
        return self.shuffle and not self.is_full(epoch)

    def _divisible(self, accesses: int) -> int:
        rest = accesses % self.pad_to
        if self.drop_last and accesses >= self.pad_to:
            return accesses - rest
        return accesses + (self.pad_to - rest if rest else 0)


def expected(
    visits: NDArray[np.float64], accesses: int, times: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return f32[n], accesses until the next one of samples visited so often in an epoch.

    In ``times`` where that is given.
    """
    longest = np.finfo(np.float32).max / 2
    times = np.empty(len(visits), np.float32) if times is None else times
    with np.errstate(divide="ignore"):
        for part in in_parts(len(visits)):
            times[part] = np.minimum(accesses / visits[part], longest)
    return times


def has_evidence(scores: Scores) -> bool:
    """Whether there is something to draw by: a sample seen, and a scorer that is ready."""
    return scores.ready and bool(scores.seen.any())
