"""SpiderCache: samples are nodes of a graph, and key samples stand in for their neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.importance.background import Background
from stoker.importance.base import Scorer
from stoker.importance.graph import Graph
from stoker.policy.base import Substitution
from stoker.policy.score import Homophily, Score
from stoker.policy.shares import ElasticSplit
from stoker.recipes.base import Recipe, choose, part
from stoker.sampler.weighted import WeightedSampler


def spidercache(
    neighbor_max: int = 500,
    target_degree: float = 50.0,
    decay: float = 1.0,
    threshold: float | None = None,
    start: float = 0.9,
    end: float = 0.8,
    m: int = 5,
    gamma: float = 0.01,
    window: int = 5,
    order: int = 2,
    parts: str = "importance+homophily+elastic",
) -> Recipe:
    """Return SpiderCache, or as much of it as ``parts`` says.

    - ``importance``: a sample scores high among embeddings of other classes or alone, low in the
      midst of its class: of at most ``neighbor_max`` neighbours with a similarity e^(-``decay``
      distance) above ``threshold``. None calibrates that to ``target_degree`` neighbours in the
      mean. Epochs are drawn with replacement by score; the sample with the lowest score is evicted.
    - ``importance+homophily``: the share 1 - ``start`` of the cache is a queue of key samples, each
      batch's with most neighbours, which stand in for their missing neighbours.
    - ``importance+homophily+elastic``: the importance region's share goes from ``start`` to ``end``
      once the scores converge; ``m``, ``gamma``, ``window`` and ``order`` as in
      :class:`~stoker.policy.shares.ElasticSplit`. It needs the Loader's ``epochs``, and accuracy
      from ``end_epoch``.

    Needs ``observe(losses, embeddings=..., labels=...)`` and the extra ``importance``. Scoring runs
    during the backward pass. Not here: the paper's product quantization of the index. Source:
    SpiderCache, ICPP 2025.
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
        ),
        sampler=part(WeightedSampler),
        policy=Score(ties=False),
    )
    homophily = replace(
        importance,
        policy=Homophily(start),
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


def graph_beside_training(num_samples: int, **parameters: Any) -> Scorer:
    """Return a :class:`Graph` for so many samples, which scores in a thread of its own."""
    return Background(Graph(num_samples, **parameters))
