"""iCache: easy samples are left out of some epochs, or stand in for each other."""

from __future__ import annotations

from dataclasses import replace

from stoker.bundles import Packaging
from stoker.policy.base import Substitution
from stoker.policy.baselines import LRU
from stoker.policy.high_low import HighLow
from stoker.policy.score import Score
from stoker.policy.shares import FrequencySplit
from stoker.recipes.base import Recipe, choose, part
from stoker.sampler.selective import SelectiveSampler


def icache(
    beta: float = 0.33,
    warm_up: int = 5,
    full_every: int = 3,
    h_share: float = 0.7,
    start: float = 0.9,
    package_bytes: int | None = None,
    package_url: str | None = None,
    parts: str = "iis+hc+lc",
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

    The defaults of ``beta``, ``warm_up``, ``full_every`` and ``h_share`` are those of the authors'
    public code. The H-list is a fixed share of the plan. Not here: the paper's ST_HC variant, and a
    probe of benefits by its Table III. Source: Chen et al., "iCache: An
    Importance-Sampling-Informed Cache for Accelerating I/O-Bound DNN Model Training", HPCA 2023.
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
        policy=HighLow(h_share, start),
        shares=FrequencySplit(start=start),
        substitution=Substitution("low_by_low", "L"),
        packaging=Packaging.of(package_bytes, package_url),
    )
    return choose("parts", parts, {"iis": selection, "iis+hc": with_h, "iis+hc+lc": with_l})
