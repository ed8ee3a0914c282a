"""Recipes of less common papers, for comparison."""

from __future__ import annotations

from stoker.importance.baselines import SelectiveBackward
from stoker.policy.base import Substitution
from stoker.policy.baselines import LFU, LRU, MinIO
from stoker.policy.score import Score
from stoker.recipes.base import Recipe, part
from stoker.recipes.baselines import lru_hit_ratio
from stoker.sampler.baselines import InfoBatchSampler, SelectiveSampler


def base_cis(beta: float = 0.33, history: int = 1024) -> Recipe:
    """Return computing-oriented importance sampling (CIS), the baseline "Base" of iCache.

    Uniform epochs over an LRU cache; of each batch, only samples kept with probability
    percentile(loss)^``beta`` enter the gradient (``loader.weights`` is 0 for the others), the
    percentile taken over the last ``history`` losses. It saves computing and no I/O, and so shows
    what is left to gain by choosing before fetching. Source: Jiang et al., "Accelerating Deep
    Learning by Focusing on the Biggest Losers", 2019; its name and beta from iCache (HPCA 2023).
    """
    return Recipe(
        "base_cis",
        "uniform, learns from hard samples; evicts the least recently used",
        policy=LRU(),
        backward=part(SelectiveBackward, beta=beta, history=history),
        limit=lru_hit_ratio,
    )


def ilfu(beta: float = 0.33, warm_up: int = 5, full_every: int = 3) -> Recipe:
    """Return iCache's sampling over an LFU cache, the baseline "iLFU" of its paper.

    Hard samples are visited more often, so counting accesses finds them, but late: shows what a
    cache gains by knowing the scores. Parameters as in :func:`icache`. Source: iCache (Chen et
    al., HPCA 2023), section 5.
    """
    return Recipe(
        "ilfu",
        "easy samples are left out at times; evicts the least frequently used",
        policy=LFU(),
        sampler=part(SelectiveSampler, beta=beta, warm_up=warm_up, full_every=full_every),
    )


def infobatch(prune: float = 0.5, delta: float = 0.875, easiest: float | None = None) -> Recipe:
    """Return InfoBatch's unbiased pruning over a cache that keeps hard samples.

    A share ``prune`` of the samples with a loss below the mean is left out of each epoch, at
    random; those that stay weigh 1/(1 - prune) in ``loader.weights``. The last 1 - ``delta`` of
    the training is full and unweighted, so the Loader must be given ``epochs``. ``easiest`` takes
    a fixed share of the losses instead of those below the mean, which fixes the length of epochs.
    The paper has no cache; samples above the mean are visited in every epoch, so a cache ordered
    by loss is the one that suits. Source: Qin et al., "InfoBatch: Lossless Training Speed Up by
    Unbiased Dynamic Data Pruning", ICLR 2024.
    """
    return Recipe(
        "infobatch",
        "easy samples are left out by half, the rest reweighted; hard ones stay",
        policy=Score(),
        sampler=part(InfoBatchSampler, prune=prune, delta=delta, easiest=easiest),
    )


def quiver() -> Recipe:
    """Return uniform epochs whose order adapts to what is cached.

    A sample that is not cached is replaced by one that is and was not served yet in this epoch,
    and gets a turn later, when no such sample is left. So each sample is served once an epoch, as
    without, and the cache is used up first: its hits are for the most part substitutions, and
    both together are what a static cache hits. The cache keeps what came first. Not here: Quiver's
    co-operative handling of several jobs at one cache. Source: Kumar and
    Sivathanu, "Quiver: An Informed Storage Cache for Deep Learning", FAST 2020, section 3.
    """
    return Recipe(
        "quiver",
        "uniform; any cached sample stands in for a missing one",
        policy=MinIO(),
        substitution=Substitution("any", "main"),
    )
