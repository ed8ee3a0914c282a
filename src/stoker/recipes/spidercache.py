"""SpiderCache: samples are nodes of a graph, and key samples stand in for their neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from stoker.importance.base import Background, Scorer
from stoker.importance.graph import Graph
from stoker.policy.base import Substitution
from stoker.policy.score import Homophily, Score
from stoker.policy.shares import ElasticSplit
from stoker.recipes.base import Recipe, choose, part
from stoker.sampler.baselines import WeightedSampler


def spidercache(
    neighbor_max: int | None = None,
    target_degree: float | None = None,
    decay: float = 1.0,
    threshold: float | None = None,
    start: float = 0.9,
    end: float = 0.8,
    m: int = 5,
    gamma: float = 0.01,
    window: int = 5,
    order: int = 2,
    parts: str = "importance+homophily+elastic",
    transit: float | None = None,
    code_bytes: int | None = None,
) -> Recipe:
    """Return SpiderCache, or as much of it as ``parts`` says.

    - ``importance``: a sample scores high among embeddings of other classes or alone, low in the
      midst of its class: of at most ``neighbor_max`` neighbours with a similarity e^(-``decay``
      distance) above ``threshold``. None calibrates that to ``target_degree`` neighbours in the
      mean. By default both scale with the number of samples: :func:`neighbours_for`. Epochs are
      drawn with replacement by score; the sample with the lowest score is evicted.
    - ``importance+homophily``: the share 1 - ``start`` of the cache is a queue of key samples, each
      batch's with most neighbours, which stand in for their missing neighbours. What waits for its
      step lies in ``transit``, a share of the cache, by default as much as the batches on their way
      take, a tenth at most; the paper has no such region.
    - ``importance+homophily+elastic``: the importance region's share goes from ``start`` to ``end``
      once the scores converge; ``m``, ``gamma``, ``window`` and ``order`` as in
      :class:`~stoker.policy.shares.ElasticSplit`. It needs the Loader's ``epochs``, and accuracy
      from ``end_epoch``.

    Needs ``observe(losses, embeddings=..., labels=...)`` and the extra ``importance``. Scoring runs
    during the backward pass. ``code_bytes`` keeps each embedding as so many bytes, in place of 4 a
    dimension: product quantization, as in the paper (its Table 2). Source: SpiderCache, ICPP 2025.
    """
    importance = Recipe(
        "spidercache",
        "outlying samples are drawn more often; key samples stand in for others",
        scorer=part(
            graph_beside_training,
            neighbor_max=neighbor_max,
            target_degree=target_degree,
            decay=decay,
            threshold=threshold,
            code_bytes=code_bytes,
        ),
        sampler=part(WeightedSampler),
        policy=Score(ties=False),
    )
    homophily = replace(
        importance,
        policy=Homophily(start, transit),
        substitution=Substitution("neighbour", "homophily"),
    )
    elastic = replace(homophily, shares=ElasticSplit(start, end, m, gamma, window, order))
    return choose(
        "parts",
        parts,
        {
            "importance": importance,
            "importance+homophily": homophily,
            "importance+homophily+elastic": elastic,
        },
    )


class Neighbourhood(NamedTuple):
    """How many neighbours count in the graph."""

    neighbor_max: int
    target_degree: float


def neighbours_for(
    num_samples: int, neighbor_max: int | None = None, target_degree: float | None = None
) -> Neighbourhood:
    """Return how many neighbours count among so many samples, where that is not given.

    ``neighbor_max`` is a hundredth of the samples, from 10 to the paper's 500, which is that of its
    CIFAR-10; ``target_degree``, our calibration, a tenth of it. So a key sample stands for the same
    share of small data as of 50,000 samples: with 500 and 50 of 4,000 it was for 5.4 % of them, not
    1.0 %. One that is given moves the other, where that has to be larger.
    """
    most = neighbor_max
    if most is None:
        most = min(max(num_samples // 100, 10), 500)
        if target_degree is not None and target_degree > 0:
            most = min(max(most, math.ceil(10 * target_degree)), 500)
    return Neighbourhood(most, most / 10 if target_degree is None else target_degree)


def graph_beside_training(
    num_samples: int,
    *,
    neighbor_max: int | None = None,
    target_degree: float | None = None,
    **parameters: Any,
) -> Scorer:
    """Return a :class:`Graph` for so many samples, which scores in a thread of its own.

    ``neighbor_max`` and ``target_degree`` are as :func:`neighbours_for` has them, the other
    parameters those of the graph.
    """
    scale = neighbours_for(num_samples, neighbor_max, target_degree)
    return Background(Graph(num_samples, **scale._asdict(), **parameters))
