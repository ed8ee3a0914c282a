"""InfoBatch: half of the easy samples are left out, and the others count for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.sampler.epoch import Draw, EpochSampler, expected
from stoker.scores import Scores
from stoker.shared import SharedArray

_AT_ONCE = 1 << 16


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
        ids, is_easy = self._kept(scores, _shuffled(self.num_samples, rng))
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


def _shuffled(count: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """Return u32[count], a permutation, as mapped memory that a plan can have afterwards."""
    order = SharedArray.create(count, np.uint32, name="sampler.order").array
    for begin in range(0, count, _AT_ONCE):
        order[begin : begin + _AT_ONCE] = np.arange(begin, min(begin + _AT_ONCE, count))
    rng.shuffle(order)
    return order


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
