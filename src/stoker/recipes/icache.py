"""iCache: easy samples are left out of some epochs, or stand in for each other."""

from __future__ import annotations

from dataclasses import replace

from stoker.bundles import Packaging
from stoker.policy.base import Substitution
from stoker.policy.baselines import LRU
from stoker.policy.score import HighLow, Score, Split
from stoker.policy.shares import FrequencySplit
from stoker.recipes.base import Recipe, choose, part
from stoker.sampler.baselines import SelectiveSampler

SUBSTITUTES = {
    "low": Substitution("low_by_low", "L"),
    "high": Substitution("low_by_high", "L", by="H"),
}
"""What is served for missing samples of low importance, by the recipe's word for it."""


def icache(
    beta: float = 0.33,
    warm_up: int = 5,
    full_every: int = 3,
    h_share: float = 0.7,
    start: float = 0.9,
    package_bytes: int | None = None,
    package_url: str | None = None,
    parts: str = "iis+hc+lc",
    split: Split = "fixed",
    substitute: str = "low",
) -> Recipe:
    """Return iCache, or as much of it as ``parts`` says: ``iis``, ``iis+hc``, ``iis+hc+lc``.

    - IIS: after ``warm_up`` full epochs, a sample is kept with probability
      percentile(loss)^``beta``, except in every ``full_every``-th epoch, which is full. Alone it
      runs over an LRU cache.
    - H-cache: the sample with the lowest loss is evicted, and only for one with a higher loss.
    - L-cache: the ``h_share`` most important of an epoch's samples are its H-list; the others come
      in packages of ``package_bytes`` or more, each one read, and a missing one of them is
      replaced by one that is there and was not served yet. By default a package has 1 MiB, or a
      twentieth of the cache if that is less. H-samples are neither replaced nor stand in. The
      cache is divided as accesses are, beginning with the share ``start`` for H.
      Packages lie in a temporary directory, or at ``package_url``.
    - ``split``: ``fixed`` makes the H-list that share of each plan, so that the cache is divided
      ``h_share`` to the rest from the second epoch with lists on; with ``moving`` it is that share
      of all samples, so that H's part of the accesses, and of the cache an epoch later, is larger
      after a selective epoch than after a full one. What is fixed by the paper is how accesses
      divide the cache; both readings of the list are ours.
    - ``substitute``: ``low`` replaces a missing sample as above (the paper's ST_LC). With ``high``
      it is replaced by a random one of the H-cache, which still has its own turn (ST_HC): no
      search for what was not served yet, but H-samples come more often than planned and L-samples
      less often.

    The defaults of ``beta``, ``warm_up``, ``full_every`` and ``h_share`` are those of the authors'
    public code. Not here: a probe of benefits by the paper's Table III. Source: Chen et al.,
    "iCache: An Importance-Sampling-Informed Cache for Accelerating I/O-Bound DNN Model Training",
    HPCA 2023.
    """
    selection = Recipe(
        "icache",
        "easy samples are left out at times, or stand in for each other",
        policy=LRU(),
        sampler=part(SelectiveSampler, beta=beta, warm_up=warm_up, full_every=full_every),
    )
    with_h = replace(selection, policy=Score(ties=False))
    with_l = replace(
        with_h,
        policy=HighLow(h_share, start, split),
        shares=FrequencySplit(start=start),
        substitution=choose("substitute", substitute, SUBSTITUTES),
        packaging=Packaging.of(package_bytes, package_url),
    )
    return choose("parts", parts, {"iis": selection, "iis+hc": with_h, "iis+hc+lc": with_l})
