"""Samples drawn in proportion to their scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import scores_or_median, systematic
from stoker.sampler.epoch import Draw, EpochSampler
from stoker.scores import Scores


@dataclass(frozen=True)
class WeightedSampler(EpochSampler):
    """Draws from p = (1 - e) q + e/N, where q is the share of all scores; by default N of them.

    With ``replacement`` draws are independent. Without it ``draws`` distinct samples come, each
    with probability min(1, c p), c such that these sum to ``draws``, by systematic sampling.

    An unseen sample scores as the median of the seen ones. With ``reweight`` each access weighs
    draws/(N x expected visits) in the loss, with replacement 1/(N p), so the mean of weighted
    gradients has the full mean as its expectation; the uniform part bounds these weights by 1/e
    (a defensive mixture: Hesterberg, Technometrics 1995). Source of the draw: Katharopoulos and
    Fleuret, ICML 2018, equation 3.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for a uniform part outside 0 to
    1, for ``reweight`` without one: a sample that is never drawn has no weight that makes up
    for it; and for less than one draw or, without replacement, not less than N.
    """

    reweight: bool = False
    """Give weights that undo the bias of the draw."""
    uniform_part: float = 0.0
    """e: the share of draws that are uniform; 0.2 bounds weights by 5."""
    draws: int | None = None
    """Accesses of an epoch, for all ranks together; None: N."""
    replacement: bool = True
    """Whether a sample may come more than once an epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.uniform_part <= 1:
            raise ConfigError(
                f"uniform_part={self.uniform_part} is out of range: give a share, 0 to 1"
            )
        if self.reweight and not self.uniform_part:
            raise ConfigError("reweight=True needs a uniform part: give uniform_part=0.2")
        if self.draws is not None and self.draws < 1:
            raise ConfigError(
                f"draws={self.draws} is out of range: give at least 1, or None for all"
            )
        if not self.replacement and self.size(None) >= self.num_samples:
            raise ConfigError(
                f"draws={self.draws} of {self.num_samples} samples without replacement would be "
                "all of them whatever their scores: give fewer draws, or replacement=True"
            )

    @property
    def longest(self) -> int:
        """Accesses of a full pass or of a draw, whichever has more."""
        return max(super().longest, self._divisible(self.size(None)))

    def size(self, scores: Scores | None) -> int:
        """Return ``draws``, by default N."""
        return self.num_samples if self.draws is None else self.draws

    def probabilities(self, scores: Scores) -> NDArray[np.float64]:
        """Return f64[N], p: the probability of each sample in one draw; the sum is 1."""
        values = scores_or_median(scores)
        share = values / values.sum()
        p: NDArray[np.float64] = (1 - self.uniform_part) * share
        return p + self.uniform_part / self.num_samples

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return the accesses, in an order of no meaning."""
        p, size = self.probabilities(scores), self.size(scores)
        if self.replacement:
            visits = size * p
            every = np.arange(self.num_samples, dtype=np.uint32)
            ids = np.repeat(every, rng.multinomial(size, p))
            rng.shuffle(ids)
        else:
            visits = inclusion(p, size)
            ids = systematic(visits, size, rng)
        return Draw(ids, size / (self.num_samples * visits[ids]) if self.reweight else None)


def inclusion(p: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return f64[N]: min(1, c p) with c such that the sum is ``size``, below N.

    Where no more than ``size`` have a probability above 0 they get 1, and the others the rest.
    """
    drawable = p > 0
    if drawable.sum() <= size:
        return np.where(drawable, 1.0, (size - drawable.sum()) / (~drawable).sum())
    certain = np.zeros(len(p), np.bool_)
    while True:
        scaled = p * ((size - certain.sum()) / p[~certain].sum())
        over = ~certain & (scaled >= 1)
        if not over.any():
            return np.where(certain, 1.0, scaled)
        certain |= over
