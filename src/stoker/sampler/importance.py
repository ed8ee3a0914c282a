"""Important samples more often, within bounds, and with weights that undo the bias."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import (
    annealed_from,
    generator,
    scores_or_median,
    systematic_visits,
)
from stoker.sampler.super_epochs import super_epoch
from stoker.sampler.uniform import Draw, EpochSampler, expected, has_evidence
from stoker.scores import Scores
from stoker.shared import SharedArray, in_parts, scratch


@dataclass(frozen=True)
class ImportanceSampler(EpochSampler):
    """N visits an epoch, expected in proportion to p = (1 - e) q + e/N; weights undo the bias.

    q is the share of all scores, none above their quantile ``clip``, so that a few wrong labels do
    not take the epoch. A sample comes N p times in the mean, and never less often than that rounded
    down nor more than rounded up: systematic sampling, which varies less than independent draws.
    Each access weighs 1/(N p) in the loss, so that the mean of weighted gradients has the full mean
    as its expectation. The uniform part e is at least ``uniform_part``, which bounds the weights by
    1/e (a defensive mixture: Hesterberg, Technometrics 1995), and more where the effective sample
    size of the weights would fall below ``min_ess``. The last share ``annealed`` of the training
    is full passes without weights.

    The visits of ``repeat`` epochs are drawn at once, from the scores as the first of these began,
    in one random order: so the next epoch is known but at their ends, where plans say when each
    sample is to be expected, and a cache that looks ahead keeps what comes soon. With equal scores
    these are super-epochs. Source: Stoker's own.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for shares out of range, a
    ``repeat`` below 1 and a negative ``warm_up``.
    """

    repeat: int = field(default=4, kw_only=True)
    """R: epochs that are drawn at once."""
    uniform_part: float = field(default=0.2, kw_only=True)
    """e: the least share of visits that are uniform, above 0 to 1; 0.2 bounds weights by 5."""
    min_ess: float = field(default=0.7, kw_only=True)
    """Least effective sample size of the weights of an epoch / N, 0 to below 1."""
    clip: float = field(default=0.95, kw_only=True)
    """Quantile of the scores at which they are cut, above 0 to 1."""
    annealed: float = field(default=0.125, kw_only=True)
    """Share of the training, at its end, in full passes, 0 to 1; rounded up to whole epochs, and
    none where the number of ``epochs`` is not known."""

    warm_up: int = field(default=0, kw_only=True)
    """Full passes at the start, in which scores ripen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("uniform_part", "clip"):
            if not 0 < getattr(self, name) <= 1:
                value = getattr(self, name)
                raise ConfigError(f"{name}={value} is out of range: give a share above 0, up to 1")
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} is out of range: give 1 epoch or more")
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up} is out of range: give 0 epochs or more")
        if not 0 <= self.min_ess < 1:
            raise ConfigError(f"min_ess={self.min_ess} is out of range: give a share, 0 to below 1")
        if not 0 <= self.annealed <= 1:
            raise ConfigError(f"annealed={self.annealed} is out of range: give a share from 0 to 1")

    def is_full(self, epoch: int) -> bool:
        """Whether ``epoch`` belongs to the warm-up or to the annealed end."""
        if epoch < self.warm_up:
            return True
        return self.epochs is not None and epoch >= annealed_from(self.epochs, self.annealed)

    def begin_epoch(self, scores: Scores, epoch: int) -> None:
        """Keep the scores that the super-epoch of ``epoch`` is drawn from, unless kept already."""
        begin, _ = self._super_epoch(epoch)
        if scores.basis_epoch != begin and has_evidence(scores) and not self.is_full(epoch):
            scores.set_basis(scaled(scores_or_median(scores)), begin)

    def foresees(self, scores: Scores | None, epoch: int) -> bool:
        """Whether ``epoch`` is a full pass, or among those that are drawn already."""
        if super().foresees(scores, epoch):
            return True
        return scores is not None and scores.basis_epoch == self._super_epoch(epoch)[0]

    def visits(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return f64[N], the expected visits in an epoch of samples that score f64[N] ``values``.

        They sum to N.
        """
        share: NDArray[np.float64] = scratch(len(values), np.float64)
        share[:] = values
        most = np.quantile(share, self.clip, overwrite_input=True)
        np.minimum(values, most, out=share)
        if not share.any():
            return np.ones(self.num_samples)
        share /= share.max()
        share *= self.num_samples / share.sum()
        least = _uniform_part(share, self.min_ess, self.uniform_part)
        share *= 1 - least
        share += least
        return share

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return N accesses, the epoch's part of its super-epoch, with their weights."""
        begin, epochs = self._super_epoch(epoch)
        is_drawn = scores.basis_epoch == begin
        basis = scores.basis if is_drawn else scaled(scores_or_median(scores))
        # Whether kept or not, so that both give the same visits.
        values, count = scratch(self.num_samples, np.float64), self.num_samples
        values[:] = basis.astype(np.float32, copy=False)
        visits = self.visits(values)
        del basis, values
        since = (epoch - begin) * count
        ids = systematic_visits(visits, generator(self.seed, begin, stream=3), epochs, since)
        # Into the plan's own memory, as each copy takes up some of what there is at the most.
        own = SharedArray.create(count, np.uint32, name="plan.ids")
        own.array[:] = ids[:count]
        del ids  # of all epochs
        weights = SharedArray.create(count, np.float32, name="plan.weights")
        for part in in_parts(count):
            weights.array[part] = 1 / visits.take(own.array[part])
        beyond = SharedArray.create(count, np.float32, name="plan.beyond")
        expected(visits, count, beyond.array)
        return Draw(own, weights, beyond)

    def _super_epoch(self, epoch: int) -> tuple[int, int]:
        return super_epoch(epoch, self.repeat, self.epochs, self.annealed, self.warm_up)


def scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide f64[N] values from 0 on by the largest, whatever their size, in place; return them."""
    if largest := values.max():
        values /= largest
    return values


def _uniform_part(share: NDArray[np.float64], min_ess: float, least: float) -> float:
    """Return the least uniform part, from ``least`` on, whose weights have that sample size.

    ``share`` f64[N] has a mean of one. Weights 1/v of visits expected v times have a mean of one
    over an epoch's accesses, and a mean square of mean(1/v): the sample size is its inverse.
    """
    mean, slope = _mean_weight(share, least)
    if mean * min_ess <= 1:
        return least
    # The mean falls and is convex: Newton's steps end at the solution and never go beyond it.
    found, step = least, 1.0
    while step > 1e-13:
        step = (mean - 1 / min_ess) / -slope
        found += step
        mean, slope = _mean_weight(share, found)
    low, high = least, 1.0
    for _ in range(30):  # halvings: a little above it, so that rounding does not matter
        middle = (low + high) / 2
        low, high = (low, middle) if middle >= found else (middle, high)
    return high


def _mean_weight(share: NDArray[np.float64], uniform: float) -> tuple[float, float]:
    """Return the mean of 1/v, v a mixture of f64[N] ``share`` with a ``uniform`` part; its slope.

    The slope is by the uniform part: v grows by 1 - share of it.
    """
    total = slope = 0.0
    for part in in_parts(len(share)):
        weights = share[part] * (1 - uniform)
        weights += uniform
        np.divide(1, weights, out=weights)
        total += float(weights.sum())
        weights *= weights
        slope -= float(weights.sum())
        weights *= share[part]  # and no product of vectors: BLAS has threads
        slope += float(weights.sum())
    return total / len(share), slope / len(share)
