"""What the time of training is measured for, and the speed-ups that papers report.

Warm-ups are scaled to short trainings: one epoch of iCache's, two of ImPACT's, which needs two to
compare; every other constant is the recipe's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker import recipes
from stoker.recipes import Recipe

CACHE = 0.2
DEFAULT = "default"
"""What speed is told against: uniform epochs, LRU, with the prefetcher that all have."""


@dataclass(frozen=True)
class Timed:
    """One way to train whose time is measured."""

    recipe: Callable[[], Recipe]
    prefetch: bool = True
    """Whether samples are read ahead."""


def _of(name: str, **params: object) -> Callable[[], Recipe]:
    return lambda: getattr(recipes, name)(**params)


_ICACHE = {"warm_up": 1}
_IMPACT = {"warm_up": 1, "max_warm_up": 2}

TIMED = {
    DEFAULT: Timed(_of("lru")),
    "default, no prefetch": Timed(_of("lru"), prefetch=False),
    "coordl": Timed(_of("minio")),
    "quiver": Timed(_of("quiver")),
    "foresight": Timed(_of("foresight")),
    "foresight, repeat 4": Timed(_of("foresight", repeat=4)),
    "foresight, repeat 8": Timed(_of("foresight", repeat=8)),
    "foresight, importance, repeat 4": Timed(_of("foresight", importance=True, repeat=4)),
    "base": Timed(_of("base_cis")),
    "ilfu": Timed(_of("ilfu", **_ICACHE)),
    "shade": Timed(_of("shade")),
    "shade x3": Timed(_of("shade", repetition=3, important=CACHE)),
    "icache iis": Timed(_of("icache", parts="iis", **_ICACHE)),
    "icache iis+hc": Timed(_of("icache", parts="iis+hc", **_ICACHE)),
    "icache": Timed(_of("icache", **_ICACHE)),
    "impact iis+hc": Timed(_of("impact", parts="iis+hc", **_IMPACT)),
    "impact": Timed(_of("impact", **_IMPACT)),
    "impact history": Timed(_of("impact", evaluation="history", **_IMPACT)),
    "impact realtime": Timed(_of("impact", evaluation="realtime", **_IMPACT)),
    "spider importance": Timed(_of("spidercache", parts="importance")),
    "spider +homophily": Timed(_of("spidercache", parts="importance+homophily")),
    "spidercache": Timed(_of("spidercache")),
    "infobatch": Timed(_of("infobatch")),
    "oracle": Timed(_of("oracle")),
}
"""By name, in the order of the tables. The oracle has all samples cached and only computes."""

PLAIN = tuple(name for name in TIMED if not name.startswith("foresight, "))
"""Those of the table of all recipes."""

FORESIGHT = (
    DEFAULT,
    "coordl",
    *(name for name in TIMED if name.startswith("foresight")),
    "shade",
    "icache",
    "impact",
    "spidercache",
    "infobatch",
    "oracle",
)
"""Those of the comparison of foresight with the papers."""

SMOKE = (DEFAULT, "default, no prefetch", "shade", "icache", "impact", "spidercache")
"""Those of a look at whether it runs."""

PAPERS = ("shade", "shade x3", "icache", "impact", "spidercache")
"""Whole systems that foresight is to beat."""

PUBLISHED = {
    "icache": "1.7 to 2.4 over Default",
    "impact": "up to 3.5 over CoorDL",
    "spidercache": "2.33 over Default",
}
"""Speed-ups in the papers, on their machines, with whole trainings."""

ABLATIONS = {
    "iCache": (DEFAULT, "base", "ilfu", "icache iis", "icache iis+hc", "icache"),
    "ImPACT": ("coordl", "icache", "impact history", "impact realtime", "impact iis+hc", "impact"),
    "SpiderCache": (DEFAULT, "spider importance", "spider +homophily", "spidercache"),
}
"""Rows of the ablation tables; speed is told against the first."""
