"""What is trained, what is replayed on which record, and what the papers found.

Warm-ups and packages are scaled to short trainings of small data; every other constant is the
recipe's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker import recipes
from stoker.policy.baselines import MinIO
from stoker.recipes import Recipe

TRAINED_AT = 0.2
"""Cache share of every training; what is served does not touch it, unless samples stand in."""
LIVE_AT = 0.5
"""Cache share of the second live run of each recipe."""
SHARES = (0.1, 0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8)
"""Cache shares that records are replayed with."""

_WARM_UP = {"warm_up": 2}


@dataclass(frozen=True)
class Training:
    """One way to train, by name."""

    recipe: Callable[[float], Recipe]
    """Makes the recipe for a cache share."""
    flipped: bool = True
    """Whether it is trained on wrong labels as well."""
    is_checked: bool = False
    """Whether its scores are held against a full evaluation before each epoch."""
    sizes_of: str | None = None
    """The training whose number of visits by epoch random pruning takes over."""


def _of(name: str, **params: object) -> Callable[[float], Recipe]:
    return lambda cache: getattr(recipes, name)(**params)


def _shade_by_code(cache: float) -> Recipe:
    """What SHADE's public code does: repeat three times what the cache has room for."""
    return recipes.shade(repetition=3, important=cache)


TRAININGS = {
    "uniform": Training(_of("minio")),
    "base": Training(_of("base_cis"), flipped=False),
    "quiver": Training(_of("quiver"), flipped=False),
    "shade": Training(_of("shade")),
    "shade x3": Training(_shade_by_code),
    "iis": Training(_of("icache", parts="iis", **_WARM_UP), is_checked=True),
    "icache": Training(_of("icache", **_WARM_UP), flipped=False),
    "impact hc": Training(_of("impact", parts="iis+hc", max_warm_up=4), is_checked=True),
    "impact": Training(_of("impact", max_warm_up=4), flipped=False),
    "spider importance": Training(_of("spidercache", parts="importance")),
    "spidercache": Training(_of("spidercache"), flipped=False),
    "infobatch": Training(_of("infobatch")),
    "random as iis": Training(_of("minio"), sizes_of="iis"),
    "random as infobatch": Training(_of("minio"), sizes_of="infobatch"),
}
"""By name. Those with substitutes train on what stands in, so their accuracy is that of one cache
size; the others' accuracy does not depend on the cache."""


@dataclass(frozen=True)
class Replay:
    """A cache tried on the record of a training."""

    of: str
    """The training whose record it is."""
    recipe: Callable[[float], Recipe]
    paper: dict[float, float] | None = None
    """Published hits, with all that it counts as one, by cache share."""
    hits_first: bool = False
    """Serve what scores highest first, as public code of SHADE does with what is cached."""


REPLAYS = {
    "lru": Replay("uniform", _of("lru"), {0.2: 0.02, 0.4: 0.09, 0.6: 0.23, 0.8: 0.48}),
    "minio": Replay("uniform", _of("minio")),
    "quiver": Replay("uniform", _of("quiver")),
    "shade": Replay("shade", _of("shade")),
    "shade, minio": Replay("shade", lambda cache: replace(recipes.shade(), policy=MinIO())),
    "icache iis": Replay("iis", _of("icache", parts="iis", **_WARM_UP)),
    "ilfu": Replay("iis", _of("ilfu", **_WARM_UP)),
    "icache iis+hc": Replay("iis", _of("icache", parts="iis+hc", **_WARM_UP), {0.2: 0.25}),
    "icache": Replay(
        "iis",
        _of("icache", **_WARM_UP),
        {0.2: 0.37, 0.4: 0.55, 0.6: 0.69, 0.8: 0.83},
    ),
    "impact iis+hc": Replay("impact hc", _of("impact", parts="iis+hc", max_warm_up=4), {0.2: 0.37}),
    "impact": Replay(
        "impact hc",
        _of("impact", max_warm_up=4),
        {0.2: 0.43, 0.4: 0.61, 0.6: 0.74, 0.8: 0.88},
    ),
    "spider importance": Replay("spider importance", _of("spidercache", parts="importance")),
    "spider +homophily": Replay(
        "spider importance", _of("spidercache", parts="importance+homophily")
    ),
    "spidercache": Replay("spider importance", _of("spidercache")),
    "infobatch": Replay("infobatch", _of("infobatch")),
}
"""By name, in the order of the tables."""

PACKAGES = 300
"""Packages that all samples would fill, at most: iCache's 1 MiB suits larger data."""


def fitted(recipe: Recipe, total_bytes: int) -> Recipe:
    """Return ``recipe`` with packages that suit samples of so many bytes together."""
    if recipe.packaging is None:
        return recipe
    packaging = replace(recipe.packaging, min_bytes=max(1, total_bytes // PACKAGES))
    return replace(recipe, packaging=packaging)


BY_CODE = {0.1: None, 0.2: 0.725}
"""Cache shares at which SHADE is trained with the repetition of its public code, with the hits
published, if any are."""
