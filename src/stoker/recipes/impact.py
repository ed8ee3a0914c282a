"""ImPACT: iCache with fresh scores for the samples whose importance moves most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker.bundles import Packaging
from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.importance.baselines import LossHistory
from stoker.importance.hybrid import Hybrid, Realtime
from stoker.policy.base import Substitution
from stoker.policy.baselines import LFU, LRU
from stoker.policy.score import HighLow, Split, StaticSet
from stoker.policy.shares import FrequencySplit
from stoker.recipes.base import Recipe, Same, choose, part
from stoker.sampler.baselines import SelectiveSampler


def impact(
    evaluation: str = "hybrid",
    of: Scorer | None = None,
    share: float = 0.25,
    overlap: float = 0.8,
    max_warm_up: int = 10,
    warm_up: int = 5,
    beta: float = 0.33,
    full_every: int = 3,
    h_share: float = 0.7,
    start: float = 0.9,
    package_bytes: int | None = None,
    package_url: str | None = None,
    parts: str = "iis+hc+lc",
    split: Split = "fixed",
) -> Recipe:
    """Return ImPACT with its hybrid ``evaluation``, or with ``history`` or ``realtime``.

    - ``hybrid``: during a warm-up of full epochs over a MinIO cache, the samples are found whose
      percentile rank varies most, as many as a ``share`` of the cache holds. It ends when more
      than ``overlap`` of them stay the same, at the latest after ``max_warm_up`` epochs. From then
      on they stay cached and are scored again before each epoch, by ``Loader(rescore=...)``; all
      others keep the score of their last visit. ``history`` rescores none and ``realtime`` all;
      both begin with ``warm_up`` full epochs. Without ``rescore=`` it is ``history``, with a
      warning.
    - ``of`` scores single samples, by default with the last loss. The paper cites RHO-LOSS and
      leaves this open: give :class:`~stoker.importance.baselines.ReducibleLoss` for it.
    - All else is as in :func:`icache`, and so are the parameters: percentile^``beta`` is our
      reading of how samples are selected.
    - ``parts``: ``iip`` is what is fetched alone, the evaluation and selection over an LRU cache
      (the paper's +IIP), and ``iip+lfu`` the same over an LFU cache (ImPACT-iLFU). There S is
      scored again too, and no cache is kept for it. ``iis+hc`` adds the H-cache and S, and
      ``iis+hc+lc`` the L-cache.

    Source: Chen et al., "ImPACT:
    Importance-Informed Prefetching and Caching for I/O-Bound DNN Training", IEEE Transactions on
    Computers 2025.
    """
    if evaluation == "realtime" and of is not None:
        raise ConfigError("evaluation='realtime' scores by the last loss: leave out of=")
    single = LossHistory() if of is None else of
    scorers: dict[str, Callable[[int], Scorer]] = {
        "hybrid": part(Hybrid, of=single, share=share, overlap=overlap, max_warm_up=max_warm_up),
        "history": Same(single),
        "realtime": part(Realtime),
    }
    scorer = choose("evaluation", evaluation, scorers)
    static = "S" if evaluation == "hybrid" else None
    divided = HighLow(h_share, start, split)
    with_l = Recipe(
        "impact",
        "as icache, with fresh scores for samples whose importance moves",
        scorer=scorer,
        # With hybrid evaluation the scorer says when the warm-up is over.
        sampler=part(
            SelectiveSampler, beta=beta, warm_up=0 if static else warm_up, full_every=full_every
        ),
        policy=StaticSet(share, divided) if static else divided,
        shares=FrequencySplit(start=start, static=static, static_share=share),
        substitution=Substitution("low_by_low", "L"),
        packaging=Packaging.of(package_bytes, package_url),
    )
    # With all selected samples on the H-list nothing belongs into L.
    only_h = HighLow(1.0, start, split)
    without_l = replace(
        with_l,
        policy=StaticSet(share, only_h) if static else only_h,
        substitution=None,
        packaging=None,
    )
    plain = replace(without_l, policy=LRU(), shares=None)
    chosen = choose(
        "parts",
        parts,
        {
            "iip": plain,
            "iip+lfu": replace(plain, policy=LFU()),
            "iis+hc": without_l,
            "iis+hc+lc": with_l,
        },
    )
    if evaluation == "history":
        return chosen
    unscored = impact(
        "history",
        of,
        warm_up=warm_up,
        beta=beta,
        full_every=full_every,
        h_share=h_share,
        start=start,
        package_bytes=package_bytes,
        package_url=package_url,
        parts=parts,
        split=split,
    )
    return replace(chosen, unscored=unscored)
