"""Samples drawn with replacement, in proportion to their scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.epoch import Draw, EpochSampler, scores_or_median
from stoker.scores import Scores


@dataclass(frozen=True)
class WeightedSampler(EpochSampler):
    """N independent draws from p = (1 - e) q + e/N, where q is the share of all scores.

    An unseen sample scores as the median of the seen ones. With ``reweight`` each access weighs
    1/(N p) in the loss, so the mean of weighted gradients has the full mean as its expectation;
    the uniform part bounds these weights by 1/e (a defensive mixture: Hesterberg, Technometrics
    1995). Source of the draw: Katharopoulos and Fleuret, ICML 2018, equation 3.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for a uniform part outside 0 to
    1, and for ``reweight`` without one: a sample that is never drawn has no weight that makes up
    for it.
    """

    reweight: bool = False
    """Give weights 1/(N p), which undo the bias of the draw."""
    uniform_part: float = 0.0
    """e: the share of draws that are uniform; 0.2 bounds weights by 5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.uniform_part <= 1:
            raise ConfigError(f"uniform_part={self.uniform_part} is refused: give a share, 0 to 1")
        if self.reweight and not self.uniform_part:
            raise ConfigError("reweight=True needs a uniform part: give uniform_part=0.2")

    def probabilities(self, scores: Scores) -> NDArray[np.float64]:
        """Return f64[N], p: the probability of each sample in one draw; the sum is 1."""
        values = scores_or_median(scores)
        share = values / values.sum()
        p: NDArray[np.float64] = (1 - self.uniform_part) * share
        return p + self.uniform_part / self.num_samples

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return N accesses, in an order of no meaning."""
        p = self.probabilities(scores)
        ids = np.repeat(np.arange(self.num_samples), rng.multinomial(self.num_samples, p))
        rng.shuffle(ids)
        return Draw(ids, 1 / (self.num_samples * p[ids]) if self.reweight else None)
