"""Published samplers that follow scores: draws in proportion to them, and two kinds of pruning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.draws import (
    multinomial,
    permutation,
    repeated_in_random_order,
    scores_or_median,
    systematic,
)
from stoker.sampler.uniform import Draw, EpochSampler, expected
from stoker.scores import Scores, counts_up_to
from stoker.shared import SharedArray, in_parts, scratch


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
        p = scores_or_median(scores)  # in place from here on: there may be 100 million samples
        p /= p.sum()
        p *= 1 - self.uniform_part
        p += self.uniform_part / self.num_samples
        return p

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return the accesses, in an order of no meaning."""
        p, size = self.probabilities(scores), self.size(scores)
        if not self.replacement:
            visits = capped(p, size)
            ids = systematic(visits, size, rng)
            return Draw(ids, size / (self.num_samples * visits[ids]) if self.reweight else None)
        counts = multinomial(size, p, rng)
        if not self.reweight:
            del p
            return Draw(repeated_in_random_order(counts, rng))
        visits = np.multiply(p, size, out=p)
        order = repeated_in_random_order(counts, rng)
        return Draw(order, size / (self.num_samples * visits[order.array]))


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
        """Return f64[N], the probability of each sample to be kept; the sum is :meth:`size`.

        In parts, and in memory that leaves nothing behind: there may be 100 million samples.
        """
        at_most, total = _counts_of_all(scores), self.num_samples - self.size(scores)
        known = max(1, int(np.count_nonzero(scores.seen)))

        def dropped(part: slice) -> NDArray[np.float64]:
            share: NDArray[np.float64] = 1 - (at_most[part] / known) ** self.beta
            return share

        memory: NDArray[np.float64] = scratch(self.num_samples, np.float64)
        filled = 0
        for part in in_parts(self.num_samples):
            some = dropped(part)
            some = some[some > 0]
            memory[filled : filled + len(some)] = some
            filled += len(some)
        factor = _factor(memory[:filled], total, self.num_samples)
        if factor is None:
            every = np.concatenate([dropped(part) for part in in_parts(self.num_samples)])
            return 1 - _scaled(every, total)
        for part in in_parts(self.num_samples):
            memory[part] = 1 - factor * dropped(part)
        return memory

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return the samples that are kept, each once, in random order."""
        inclusion, size = self.inclusion(scores), self.size(scores)
        ids = systematic(inclusion, size, rng)
        return Draw(ids, size / (self.num_samples * inclusion[ids]) if self.reweight else None)


@dataclass(frozen=True)
class InfoBatchSampler(EpochSampler):
    """Each sample at most once an epoch; of the easy ones a random share is left out.

    Easy is a sample whose latest loss is below the mean of all seen ones; an unseen one is not.
    Exactly a share ``prune`` of them (rounded down) is left out at random, and those that stay
    weigh as many times more, 1/(1 - prune): the sum of weighted gradients over an epoch has that of
    the full epoch as its expectation. Training ends on full, unweighted epochs. Source: InfoBatch
    (Qin et al., ICLR 2024), section 3.

    How many lie below the mean depends on the scores, so the length of an epoch is known when it
    begins, the same on all ranks, and ``length_at(epoch)`` without scores is the full N: fewer
    steps may be taken than a schedule planned, never more. Where lengths must be known at
    construction, ``easiest`` takes a fixed share of the samples by loss as the easy ones.

    Raises :class:`~stoker.errors.ConfigError` as its base does, for shares out of range, and when
    ``epochs`` is not known, without which training would never end on full epochs.
    """

    prune: float = 0.5
    """r: the share of easy samples that is left out."""
    delta: float = 0.875
    """Share of the epochs after which all samples are visited, with weights of one; what is left
    is never less than 1 - delta, nor less than one epoch."""
    easiest: float | None = None
    """Share of samples that counts as easy, the lowest losses; None: those below the mean."""
    keeps_sum: bool = True
    """Whether weights keep the sum of an epoch's gradients, as in the paper: then their mean is
    above one, and each step is larger. False: their mean is one, so that each step has the full
    gradient as its expectation, and an epoch has fewer such steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prune < 1:
            raise ConfigError(f"prune={self.prune} is out of range: give a share, 0 to below 1")
        if not 0 <= self.delta <= 1:
            raise ConfigError(f"delta={self.delta} is out of range: give a share, 0 to 1")
        if self.easiest is not None and not 0 <= self.easiest <= 1:
            raise ConfigError(
                f"easiest={self.easiest} is out of range: give a share, 0 to 1, or None"
            )
        if self.epochs is None and 0 < self.delta < 1:
            raise ConfigError(
                "InfoBatch ends on full epochs and must know how many there are: give the Loader "
                "epochs=, or delta=1 to prune in all epochs"
            )

    def is_full(self, epoch: int) -> bool:
        """Whether ``epoch`` belongs to the last 1 - delta of the training."""
        if self.delta == 1:
            return False
        return self.epochs is None or epoch >= int(self.delta * self.epochs)

    def size(self, scores: Scores | None) -> int:
        """Return N less what is left out; N when that depends on scores and there are none."""
        if self.easiest is not None:
            return self.num_samples - self._pruned(round(self.easiest * self.num_samples))
        if scores is None:
            return self.num_samples
        return self.num_samples - self._pruned(int(_is_below_mean(scores).sum()))

    def draw(self, scores: Scores, epoch: int, rng: np.random.Generator) -> Draw:
        """Return the samples that stay, each once, in random order, with their weights."""
        ids, is_easy = self._kept(scores, permutation(self.num_samples, rng).array)
        easy = int(is_easy.sum())
        # The exact ratio, as rounding down left out a little less than the share.
        weight = easy / (easy - self._pruned(easy)) if easy else 1.0
        mean = 1.0 if self.keeps_sum else self.num_samples / len(ids)
        weights = np.where(is_easy[ids], np.float32(weight / mean), np.float32(1 / mean))
        beyond = SharedArray.create(self.num_samples, np.float32, name="plan.beyond")
        rarer, each = expected(np.array([1 / weight, 1.0]), len(ids))
        beyond.array.fill(each)
        beyond.array[is_easy] = rarer
        return Draw(ids, weights, beyond)

    def _kept(
        self, scores: Scores, order: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Return u32[n], those of ``order`` that stay, and bool[N], which ids are easy."""
        if self.easiest is None:
            is_easy = _is_below_mean(scores)
        else:
            is_easy = _is_lowest(scores, order, round(self.easiest * self.num_samples))
        return order[self._stays(is_easy, order)], is_easy

    def _stays(self, is_easy: NDArray[np.bool_], order: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return bool[N] along ``order``: all but those of the easy ones that come first."""
        is_easy_here = is_easy[order]
        count = np.cumsum(is_easy_here, dtype=np.uint32)
        stays: NDArray[np.bool_] = ~is_easy_here | (count > self._pruned(int(count[-1])))
        return stays

    def _pruned(self, easy: int) -> int:
        return int(self.prune * easy)


def capped(p: NDArray[np.float64], size: int) -> NDArray[np.float64]:
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


def _counts_of_all(scores: Scores) -> NDArray[np.uint32]:
    """Return u32[N], how many seen samples score at most as each; unseen: as the highest one."""
    is_seen = scores.seen > 0
    if is_seen.all():
        return counts_up_to(scores.values)
    counts: NDArray[np.uint32] = scratch(len(scores), np.uint32)
    counts.fill(max(1, np.count_nonzero(is_seen)))
    counts[is_seen] = counts_up_to(scores.values[is_seen])
    return counts


def _most(num_samples: int) -> float:
    """Return the largest probability of being dropped, which is below one."""
    return 1 - 1 / (num_samples + 1)


def _factor(positive: NDArray[np.float64], total: int, num_samples: int) -> float | None:
    """Return what probabilities above 0 are scaled by to sum to ``total``; None: not one for all.

    That is where some would have to be as large as one.
    """
    if total >= _most(num_samples) * len(positive):
        return None
    factor = float(total / positive.sum())
    return factor if factor * positive.max() <= _most(num_samples) else None


def _scaled(dropped: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """Return the probabilities scaled to sum to ``total``, zeros last, none as large as one."""
    most = _most(len(dropped))
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


def _is_below_mean(scores: Scores) -> NDArray[np.bool_]:
    seen = scores.seen > 0
    values = scores.values if seen.all() else scores.values[seen]
    # Rounding must not lift the mean of equal values above them.
    mean = np.clip(values.mean(), values.min(), values.max())
    below: NDArray[np.bool_] = scores.values < mean
    return seen & below


def _is_lowest(scores: Scores, order: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """Return bool[N]: the ``count`` lowest losses, unseen ones last, equals as they come."""
    values = np.where(scores.seen > 0, scores.values, np.inf)[order]
    lowest = np.zeros(len(order), np.bool_)
    lowest[order[np.argsort(values, kind="stable")[:count]]] = True
    return lowest
