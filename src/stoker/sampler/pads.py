"""SHADE's sampler: important samples repeat, and more so while accuracy grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.sampler.draws import scores_or_median, shuffle
from stoker.sampler.uniform import Draw, EpochSampler
from stoker.scores import Scores

Order = Literal["spread", "hits_first"]


@dataclass(frozen=True)
class PadsSampler(EpochSampler):
    """N draws with replacement by log-rank score; the important ones' share times a factor.

    Priority-based adaptive data sampling (PADS) of SHADE, FAST 2023. The important samples are
    the top ``important`` share by score; with natural mass M they get min(1, r M) of the
    draws. The repetition factor r goes up by ``step`` after an epoch whose last three changes of
    accuracy have a mean above 0, and down by ``step``, towards the plain multinomial of r =
    ``low``, when they do not or when the loss fell steeply. It is a fold over the history of
    accuracies and losses, so a plan stays a pure function of the scores. Repeats are spread over
    the epoch.

    The authors' public code repeats whatever lies in its cache by a fixed factor instead, 3 by
    default: that is ``repetition=3`` with ``important`` set to the cache's share. By arithmetic, of
    batches of 128 the top fifth by log-rank holds .233 of the mass, and 3 x .233 = .70.

    With ``order="hits_first"`` the accesses of the important samples come before all others, in
    random order each, as that code emits what its cache holds before what it lacks. A plan does not
    know what is cached: that the important samples are, is our stand-in for it.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for factors or shares out of
    range, an unknown order, and for parameters that move the factor with a fixed ``repetition``.
    """

    repetition: float | None = None
    """r; None lets it follow the accuracies that ``end_epoch`` reports."""
    important: float = 0.2
    """Share of the samples that repetition favours, 0 to 1."""
    low: float = 1.0
    """Smallest factor when it follows accuracy; it starts here."""
    high: float = 3.0
    """Greatest factor when it follows accuracy."""
    step: float = 0.5
    """How much the factor changes after an epoch."""
    window: int = 3
    """Changes of accuracy whose mean decides."""
    steep: float = 0.2
    """The loss fell steeply when it lost more than this share of itself in one epoch."""
    order: Order = "spread"
    """Repeats far apart (``spread``), or important samples before the others (``hits_first``)."""
    smoothing: float = 0.0
    """What is added to all scores before they are drawn from, as a share of the mean loss of the
    first epoch. From then on it grows by exp((loss - loss before) / loss before) an epoch. Not in
    the paper: ``ls_param`` of the authors' public code, 0.01 there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.important <= 1:
            raise ConfigError(
                f"important={self.important} is out of range: give a share, above 0 to 1"
            )
        if self.repetition is not None and not 1 <= self.repetition < np.inf:
            raise ConfigError(
                f"repetition={self.repetition} is out of range: give at least 1, or None"
            )
        moves = ("low", "high", "step", "window", "steep")
        idle = [name for name in moves if getattr(self, name) != getattr(PadsSampler, name)]
        if self.repetition is not None and idle:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in idle)
            raise ConfigError(
                f"{given} has no effect with repetition={self.repetition}: a fixed factor does "
                "not move, leave out one or the other"
            )
        if not 1 <= self.low <= self.high < np.inf or not 0 < self.step < np.inf:
            raise ConfigError(
                f"low={self.low}, high={self.high}, step={self.step} are out of range: "
                "give 1 <= low <= high and step > 0"
            )
        if self.window < 1 or not 0 < self.steep <= 1:
            raise ConfigError(
                f"window={self.window}, steep={self.steep} are out of range: "
                "give window >= 1 and 0 < steep <= 1"
            )
        if self.order not in get_args(Order):
            raise ConfigError(
                f"order={self.order!r} is not known: use one of {', '.join(get_args(Order))}"
            )
        if not 0 <= self.smoothing < np.inf:
            raise ConfigError(f"smoothing={self.smoothing} is out of range: give 0 or more")

    @property
    def without_accuracy(self) -> str:
        """What happens to the repetition if no accuracy is reported; empty: nothing."""
        if self.repetition is not None or self.low == self.high:
            return ""
        return f"important samples are repeated by the factor {self.low:g}, and never by more"

    def factor(self, scores: Scores, epoch: int) -> float:
        """Return the repetition factor of ``epoch``, from the history of the epochs before it.

        An epoch whose accuracy was not reported leaves the factor as it was.
        """
        if self.repetition is not None:
            return self.repetition
        accuracies, losses = scores.accuracies[:epoch], scores.losses[:epoch]
        factor = self.low
        for last in np.flatnonzero(np.isfinite(accuracies)):
            known = accuracies[: last + 1]
            changes = np.diff(known[np.isfinite(known)])[-self.window :]
            if not changes.size:
                continue
            grows = changes.mean() > 0 and not self._fell_steeply(losses[: last + 1])
            factor = min(max(factor + (self.step if grows else -self.step), self.low), self.high)
        return float(factor)

    def probabilities(
        self, scores: Scores, epoch: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Return f64[N], the probability of each sample in one draw; the sum is 1.

        ``rng`` decides between equal scores which are important: log-ranks tie all the time.
        """
        return self._favoured(scores, epoch, rng)[0]

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return N accesses, in :attr:`order`."""
        probabilities, top = self._favoured(scores, epoch, rng)
        counts = rng.multinomial(self.num_samples, probabilities).astype(np.uint32)
        del probabilities  # 100 million of them take 800 MB
        if self.order == "spread":
            return Draw(spread(counts, rng))
        others = counts.copy()
        others[top] = 0
        parts = [np.repeat(np.arange(len(part)), part) for part in (counts - others, others)]
        return Draw(np.concatenate([rng.permutation(ids) for ids in parts]))

    def _favoured(
        self, scores: Scores, epoch: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
        """Return the probabilities f64[N], and the important samples u32[m]."""
        p = scores_or_median(scores)
        p += self._added(scores.losses[:epoch])
        p /= p.sum()
        top = self._important(p, rng)
        natural = p[top]
        share = natural.sum()
        mass = min(1.0, self.factor(scores, epoch) * share)
        p *= (1 - mass) / (1 - share) if share < 1 else 0.0
        p[top] = natural * (mass / share)
        p /= p.sum()
        return p, top

    def _important(self, p: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint32]:
        """Return u32[m], the samples of largest probability; ``rng`` decides between equal ones."""
        order = np.arange(self.num_samples, dtype=np.uint32)
        shuffle(order, rng)
        count = max(1, round(self.important * self.num_samples))
        ranked = p.take(order)
        np.negative(ranked, out=ranked)
        return order[np.argpartition(ranked, count - 1)[:count]]

    def _added(self, losses: NDArray[np.float64]) -> float:
        """Return what the smoothing adds to scores, from the mean losses of the epochs so far."""
        known = losses[np.isfinite(losses) & (losses > 0)]
        if not self.smoothing or not known.size:
            return 0.0
        changes = np.diff(known) / known[:-1]
        return float(self.smoothing * known[0] * np.exp(changes.sum()))

    def _fell_steeply(self, losses: NDArray[np.float64]) -> bool:
        known = losses[-2:]
        return len(known) == 2 and bool(known[1] < (1 - self.steep) * known[0])


def spread(counts: NDArray[np.uint32], rng: np.random.Generator) -> NDArray[np.uint32]:
    """Return u32[sum of counts], each id ``counts[id]`` times, its repeats evenly spaced.

    The j-th of n repeats lies near (j + phase)/n of the whole, with one random phase per id.
    """
    phases = rng.random(np.count_nonzero(counts))
    return core.spread(counts, phases, int(counts.sum(dtype=np.int64)))
