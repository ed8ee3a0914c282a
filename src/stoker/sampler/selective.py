"""iCache's sampler: easy samples are left out of some epochs, hard ones never."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import systematic
from stoker.sampler.epoch import Draw, EpochSampler
from stoker.scores import Scores, percentiles


@dataclass(frozen=True)
class SelectiveSampler(EpochSampler):
    """Each sample at most once an epoch, kept with probability percentile(score)^beta.

    I/O-oriented importance sampling (IIS) of iCache, HPCA 2023, after Selective-Backprop; the
    defaults are those of the authors' public code.
    The percentile of a sample is the share of all seen samples whose latest score is not above
    its own: 1 for the hardest, which is therefore always kept; unseen samples are kept too. What
    is left out costs no I/O. The first epochs are full passes, and every ``full_every``-th after.

    The papers flip a coin per sample; here exactly N/(1 + beta) are kept, what the coins give on
    average, by systematic sampling with those probabilities. So the length of every epoch is known
    beforehand. Where ties or unseen samples move the sum of the probabilities, the probabilities
    of being *dropped* are scaled to fit, which leaves 1 at 1. When all scores are equal, every
    sample is kept with the same probability.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for a negative beta or count.
    """

    beta: float = 0.33
    """Exponent: 0 keeps everything, larger ones favour hard samples more."""
    warm_up: int = 5
    """Full passes at the start."""
    full_every: int = 3
    """After those, every n-th epoch is a full pass; 1: all of them, 0: none."""
    reweight: bool = False
    """Weigh each kept sample by its inverse probability, so that the mean of weighted gradients
    has the full mean as its expectation; the papers do not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < np.inf:
            raise ConfigError(f"beta={self.beta} is out of range: give 0 or more")
        for name in ("warm_up", "full_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: give 0 or more")

    def is_full(self, epoch: int) -> bool:
        """Whether ``epoch`` belongs to the warm-up or is an n-th one after it."""
        after = epoch - self.warm_up + 1
        return after < 1 or (self.full_every > 0 and after % self.full_every == 0)

    def size(self, scores: Scores | None) -> int:
        """Return the samples kept: N/(1 + beta), the sum of percentile^beta, rounded."""
        return max(1, round(self.num_samples / (1 + self.beta)))

    def inclusion(self, scores: Scores) -> NDArray[np.float64]:
        """Return f64[N], the probability of each sample to be kept; the sum is :meth:`size`."""
        kept = np.ones(self.num_samples)
        seen = np.flatnonzero(scores.seen)
        seen = seen[np.argsort(scores.values[seen])]
        # Sorted first: percentiles of sorted values are found several times as fast.
        kept[seen] = percentiles(scores.values[seen]) ** self.beta
        return 1 - _scaled(1 - kept, self.num_samples - self.size(scores))

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return the samples that are kept, each once, in random order."""
        inclusion, size = self.inclusion(scores), self.size(scores)
        ids = systematic(inclusion, size, rng)
        return Draw(ids, size / (self.num_samples * inclusion[ids]) if self.reweight else None)


def _scaled(dropped: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """Return the probabilities scaled to sum to ``total``, zeros last, none as large as one."""
    most = 1 - 1 / (len(dropped) + 1)
    scaled, free = np.zeros_like(dropped), dropped > 0
    if total >= most * free.sum():
        scaled[free] = most
        if left := total - most * free.sum():
            scaled[~free] = left / (~free).sum()
        return scaled
    while True:
        factor = (total - scaled[~free].sum()) / dropped[free].sum()
        over = free & (factor * dropped > most)
        if not over.any():
            scaled[free] = factor * dropped[free]
            return scaled
        scaled[over] = most
        free &= ~over
