"""What recipes are compared with: the usual policies under uniform sampling, and other papers."""

from __future__ import annotations

import math

from stoker.importance.baselines import SelectiveBackward
from stoker.policy.base import Substitution
from stoker.policy.baselines import FIFO, LFU, LRU, S3FIFO, MinIO, Random, Sieve
from stoker.policy.next_use import NextUse
from stoker.policy.score import Score
from stoker.recipes.base import Recipe, part
from stoker.sampler.baselines import InfoBatchSampler, SelectiveSampler


def belady(request_bytes: float = 0.0) -> Recipe:
    """Return uniform sampling over a cache that evicts by next use, from the seeded plan.

    The plan reaches one epoch ahead. In bytes no policy hits more than the cache's share when
    each sample is visited once an epoch; ``request_bytes``, the cost of a request on top of its
    bytes (latency x bandwidth), keeps small samples instead and so hits more often. Source:
    NoPFS (SC 2021); Belady, IBM Systems Journal 5 (1966).
    """
    description = "uniform; evicts the sample needed latest, by the plan"
    return Recipe("belady", description, NextUse(request_bytes), limit=static_hit_ratio)


def fifo() -> Recipe:
    """Return uniform sampling over a first-in, first-out cache.

    The cheapest order there is: a hit changes nothing. A baseline, and the base of SIEVE and
    S3-FIFO. Source: the textbook policy.
    """
    return Recipe("fifo", "uniform; first in, first out", FIFO())


def lfu() -> Recipe:
    """Return uniform sampling over an LFU cache; ties evict the least recently used.

    Shuffled epochs give every sample the same count, so it only tells which samples have been in
    the cache for long. Useful when the sampler favours some samples. Source: the textbook policy;
    a baseline in SHADE (FAST 2023) and iCache (HPCA 2023).
    """
    return Recipe("lfu", "uniform; evicts the least often used", LFU())


def lru() -> Recipe:
    """Return uniform sampling over an LRU cache, the usual default and the baseline to beat.

    With each sample visited once an epoch, the one that was used longest ago is the one due
    soonest, and LRU evicts exactly that. Use it for comparison, or where accesses repeat
    within a short time. Source: the common default of operating systems and caches; its
    hit ratio under shuffled epochs as in iCache (HPCA 2023), figure 2.
    """
    return Recipe("lru", "uniform; evicts the least recently used", LRU(), limit=lru_hit_ratio)


def lru_hit_ratio(cache_fraction: float) -> float:
    """Return LRU's hit ratio when each epoch is a fresh shuffle: c + (1 - c) ln(1 - c).

    A sample visited at time t of one epoch and u of the next hits if fewer than cN distinct
    others came between: (1 - t) + u - (1 - t) u < c, with t and u uniform.
    """
    if cache_fraction >= 1:
        return 1.0
    return cache_fraction + (1 - cache_fraction) * math.log1p(-cache_fraction)


def minio() -> Recipe:
    """Return uniform sampling over a static cache that is filled once and never replaced.

    Every cached byte hits once an epoch, which no policy exceeds when each sample is visited
    once an epoch. The best plain choice for ordinary training. It is the cache of CoorDL: what
    that adds for several ranks and jobs of one node, that each sample is fetched once and kept
    once, every recipe of Stoker has; its sharing of prepared batches none has. Source: Mohan et
    al., "Analyzing and Mitigating Data Stalls in DNN Training" (CoorDL), VLDB 2021, section 5.
    """
    return Recipe(
        "minio",
        "uniform; keeps the first samples that fit, evicts nothing",
        MinIO(),
        limit=static_hit_ratio,
    )


def static_hit_ratio(cache_fraction: float) -> float:
    """Return the hit ratio from the second epoch on: the cached share itself."""
    return cache_fraction


def oracle() -> Recipe:
    """Return uniform sampling over a cache of the whole data set, filled before training begins.

    The upper bound of what any cache can give, to compare the others with: the size that the
    user gives the cache does not count, and the memory for all samples must be there. Source:
    the usual yardstick, "Oracle" in iCache (HPCA 2023).
    """
    description = "uniform; everything is cached beforehand: the upper bound"
    return Recipe("oracle", description, MinIO(), limit=full_hit_ratio, preload=True)


def full_hit_ratio(cache_fraction: float) -> float:
    """Return 1, whatever the size asked for: the whole data set is cached."""
    return 1.0


def random() -> Recipe:
    """Return uniform sampling over a cache that evicts a random sample.

    Keeps no order at all, so it cannot be fooled by one; between LRU and MinIO under shuffled
    epochs. A baseline. Source: the usual null hypothesis of caching studies.
    """
    return Recipe("random", "uniform; evicts a random one", Random(), limit=random_hit_ratio)


def random_hit_ratio(cache_fraction: float) -> float:
    """Return the hit ratio when each epoch is a fresh shuffle: -c ln(1 - c + c e^(-1/c)).

    With M(t) misses per sample up to time t of an epoch, a copy survives a stretch of misses
    with e^(-M/c). Solving M' = 1 - A e^(-M/c), A the chance to survive from the last visit to
    the end of the epoch, gives A = c and M(1) = c ln(c + (1 - c) e^(1/c)).
    """
    if cache_fraction <= 0:
        return 0.0
    return -cache_fraction * math.log1p(cache_fraction * math.expm1(-1 / cache_fraction))


def s3fifo(small: float = 0.1, ghost: float = 0.9, visits: int = 2) -> Recipe:
    """Return uniform sampling over an S3-FIFO cache; parameters as in :class:`S3FIFO`.

    Samples visited while on probation, or remembered from a recent eviction, enter the main
    queue; one-hit wonders are evicted quickly. Useful when the sampler favours some samples.
    Source: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
    Raises :class:`~stoker.errors.ConfigError` for shares or visits out of range.
    """
    policy = S3FIFO(small=small, ghost=ghost, visits=visits)
    return Recipe("s3fifo", "uniform; a small queue before the main one", policy)


def sieve() -> Recipe:
    """Return uniform sampling over a SIEVE cache.

    A hand sweeps the insertion order, spares samples visited since its last pass and evicts
    the first that was not. Strong on web-like skew; with shuffled epochs there is little to
    spare. Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
    """
    return Recipe("sieve", "uniform; a sweeping hand spares the visited", Sieve())


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
