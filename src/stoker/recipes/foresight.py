"""Foresight: eviction by a plan that is known, and may be made so that more of it hits."""

from __future__ import annotations

import numpy as np

from stoker.errors import ConfigError
from stoker.policy.next_use import AsPlanned, NextUse, OnceAnEpoch
from stoker.recipes.base import Recipe, SamplerFactory, part
from stoker.sampler.adaptive import AdaptiveSampler
from stoker.sampler.importance import ImportanceSampler
from stoker.sampler.infobatch import InfoBatchSampler
from stoker.sampler.uniform import SuperEpochSampler


def foresight(
    repeat: int = 1,
    importance: bool = False,
    prune: float = 0.0,
    adaptive: bool = False,
    annealed: float = 0.125,
    request_bytes: float | None = None,
    uniform_part: float | None = None,
    min_ess: float | None = None,
    group: float = 1.0,
) -> Recipe:
    """Return the recipe that knows the plan of coming accesses, and may make a better one.

    By default each sample is visited once an epoch, and nothing about training changes: the cache
    keeps the smallest samples, and what any job needs next where several share it
    (:class:`~stoker.policy.next_use.OnceAnEpoch`). The options below
    evict the sample needed latest instead, and with each of them the expected gradient of a step
    is that of all samples, once ``loader.weights`` are applied:

    - ``repeat`` R: each sample exactly R times in R epochs, in one random order, without weights. A
      share (1 - 1/R)^R of the accesses repeats one of the same epoch, which the cache serves: 45 %
      of all accesses hit at a cache of 20 % with R = 2, 51 % with R = 4. With ``group`` below 1
      only the visits of this share of the samples are mixed with one another: 74 % hit with R = 4
      and a group of 25 %, and an epoch sees a quarter of the samples. By chance a batch has a
      sample twice; the Loader refuses groups smaller than a step of all ranks, where each would.
    - ``importance``: N visits an epoch in proportion to clipped losses, mixed with the share
      ``uniform_part`` of uniform ones (.2 by default), or more where the effective sample size of
      the weights fell below ``min_ess`` (.7); ``loader.weights`` undo the bias. With ``repeat``
      the visits of R epochs are drawn at once. Where the next visit is not drawn yet, the
      expected one counts.
    - ``prune``: this share of the samples below the mean loss is left out of each epoch, at random;
      ``loader.weights``, whose mean is one, give the others of them their share (InfoBatch, whose
      weights make each step larger instead). An epoch has fewer steps.
    - ``adaptive``: each sample once an epoch while storage keeps up; where it does not, as many
      repeats, and finally importance, as it takes (:class:`AdaptiveSampler`). What is done, and
      why, is logged as each epoch begins.

    The last share ``annealed`` of the training, for which the Loader needs ``epochs``,
    visits each sample once an epoch again. ``request_bytes``, the cost of a request on top of its
    bytes (bandwidth / requests a second, or latency x bandwidth), keeps small samples rather than
    large ones. Where each sample comes once an epoch that costs no bytes, so the default is 10 MB
    there, and 0 otherwise; while other jobs use the cache, it is limited to a tenth of a mean
    sample. Raises :class:`~stoker.errors.ConfigError` for ``prune`` or ``adaptive`` combined with
    other options.
    Source: Stoker's own; a cache that knows the plan is that of NoPFS (SC 2021).
    """
    if (prune != 0) + adaptive + (importance or repeat != 1) > 1:
        raise ConfigError(
            f"repeat={repeat}, importance={importance}, prune={prune}, adaptive={adaptive} exclude "
            "each other: prune and adaptive choose samples in their own way, give each alone"
        )
    if group != 1 and (importance or repeat == 1):
        raise ConfigError(
            f"group={group} has no effect with repeat={repeat}, importance={importance}: give "
            "repeat=2 or more, and no importance"
        )
    given = {"uniform_part": uniform_part, "min_ess": min_ess}
    bounds = {name: value for name, value in given.items() if value is not None}
    if bounds and not (importance or adaptive):
        told = ", ".join(f"{name}={value}" for name, value in bounds.items())
        raise ConfigError(
            f"{told} has no effect without importance=True: nothing is drawn by importance"
        )
    bounds["annealed"] = annealed
    sampler: SamplerFactory = part(SuperEpochSampler, repeat=repeat, group=group, annealed=annealed)
    if importance:
        sampler = part(ImportanceSampler, repeat=repeat, **bounds)
    elif prune:
        sampler = part(InfoBatchSampler, prune=prune, delta=1 - annealed, keeps_sum=False)
    elif adaptive:
        sampler = part(AdaptiveSampler, **bounds)
    is_exact = not (importance or prune or adaptive)
    is_uniform = is_exact and repeat == 1
    once = 1e7 if request_bytes is None else request_bytes
    repeated = 0.0 if request_bytes is None else request_bytes
    policy: NextUse = NextUse(repeated)
    if is_uniform:
        policy = OnceAnEpoch(once)
    elif adaptive:
        policy = AsPlanned(once, repeated_bytes=repeated)
    return Recipe(
        "foresight",
        "evicts what the plan needs last, or is large; samples may repeat, or be drawn unbiased",
        policy=policy,
        sampler=sampler,
        limit=part(hit_ratio, repeat=repeat, group=group) if is_exact else None,
    )


def hit_ratio(cache_fraction: float, repeat: int = 1, group: float = 1.0) -> float:
    """Return the hit ratio within super-epochs that nothing exceeds; the recipe comes close.

    In a stretch of w N accesses within a group, g (1 - (1 - w / (g R))^R) N samples are distinct,
    and of their first accesses only as many hit as the cache held when it began: c N. The bound is
    the least over all w, near c + (1 - 1/R)^R with one group. And a super-epoch needs each sample
    once, so that 1 - c of R must be read.
    """
    if cache_fraction <= 0:
        return 0.0
    shares = np.linspace(0, 1, 1001)[1:]
    distinct = group * (1 - (1 - shares) ** repeat)
    hits = 1 - np.maximum(0.0, distinct - cache_fraction) / (shares * group * repeat)
    return float(min(hits.min(), 1 - max(0.0, 1 - cache_fraction) / repeat))
