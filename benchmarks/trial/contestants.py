"""Who takes part in the trial, and the small grid that each of them is tuned over.

Every contestant has :data:`BUDGET` settings: two rates of learning, and with the second of them a
second value of its own main parameter; or three rates where it has no parameter. Constants that
depend on the scale are scaled: SpiderCache's neighbours with the samples, and its transit region
with the batch; the packages of iCache and ImPACT with the bytes. Their warm-ups are tried at a
length for short trainings, and at their authors'.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from importance_cases import fitted

from stoker import recipes
from stoker.policy.score import Homophily
from stoker.recipes import Recipe

CACHE = 0.2
"""Share of the bytes that every cache holds."""
RATES = (0.05, 0.1)
"""Rates of learning of those that have a parameter of their own."""
MORE_RATES = (0.025, 0.05, 0.1)
"""Those of the others."""
BUDGET = 3
DEFAULT = "default"
"""What all others are compared with: uniform epochs over an LRU cache."""
STATIC = "minio"
"""Uniform epochs over the best cache for them; controls read through it."""

Kind = Literal["baseline", "paper", "ours", "control"]


class Setting(NamedTuple):
    """One point of a contestant's grid."""

    rate: float
    """Of learning."""
    value: float | None = None
    """Of the contestant's own parameter, if it has one."""


class Control(NamedTuple):
    """How long a contestant trains: as another one has read, taken or visited."""

    of: str
    unit: Literal["reads", "seconds", "visits", "sizes"]
    """``sizes``: as many visits in each epoch."""


@dataclass(frozen=True)
class Contestant:
    """One way to train."""

    recipe: str
    """As text; ``{value}`` is its own parameter, others are of :func:`made`."""
    kind: Kind
    parameter: str = ""
    """The name of its own parameter."""
    values: tuple[float, float] | tuple[()] = ()
    like: str | None = None
    """The contestant with the same plan, whose training it takes over: only the cache differs."""
    control: Control | None = None
    epochs: int | None = None
    """How many it trains; None: as many as all."""

    @property
    def grid(self) -> tuple[Setting, ...]:
        """The settings it is tuned over; empty where another one's training is taken over."""
        if self.like is not None:
            return ()
        if not self.values:
            return tuple(Setting(rate) for rate in MORE_RATES)
        first, second = self.values
        return (*(Setting(rate, first) for rate in RATES), Setting(RATES[1], second))


_OURS = "annealed", (0.125, 0.25)
_LONG, _SHORT = "foresight, repeat 8", "foresight, repeat 4"

_ALL = {
    DEFAULT: Contestant("lru", "baseline"),
    STATIC: Contestant("minio", "baseline", like=DEFAULT),
    "quiver": Contestant("quiver", "baseline"),
    "selective backprop": Contestant("base_cis:beta={value}", "baseline", "beta", (0.33, 0.15)),
    "infobatch": Contestant("infobatch:prune={value}", "paper", "prune", (0.5, 0.25)),
    "shade": Contestant("shade:b0={value}", "paper", "b0", (10, 40)),
    "shade x3": Contestant(
        "shade:repetition=3:important={cache}:b0={value}", "paper", "b0", (10, 40)
    ),
    "shade x3, hits first": Contestant(
        "shade:repetition=3:important={cache}:order=hits_first:b0={value}",
        "paper",
        "b0",
        (10, 40),
    ),
    "icache": Contestant("icache:warm_up={value}", "paper", "warm_up", (2, 5)),
    "impact": Contestant("impact:max_warm_up={value}", "paper", "max_warm_up", (4, 10)),
    "spidercache": Contestant(
        "spidercache:neighbor_max={neighbors}:target_degree={degree}",
        "paper",
        "degree x",
        (1, 4),
    ),
    "foresight": Contestant("foresight", "ours", like=DEFAULT),
    _SHORT: Contestant("foresight:repeat=4:annealed={value}", "ours", *_OURS),
    _LONG: Contestant("foresight:repeat=8:annealed={value}", "ours", *_OURS),
    "foresight, importance": Contestant(
        "foresight:importance=true:repeat=4:annealed={value}", "ours", *_OURS
    ),
    "foresight, adaptive": Contestant("foresight:adaptive=true:annealed={value}", "ours", *_OURS),
    "uniform, reads of repeat 8": Contestant(STATIC, "control", control=Control(_LONG, "reads")),
    "uniform, reads of repeat 4": Contestant(STATIC, "control", control=Control(_SHORT, "reads")),
    "uniform, seconds of repeat 8": Contestant(
        STATIC, "control", control=Control(_LONG, "seconds")
    ),
    "uniform, seconds of repeat 4": Contestant(
        STATIC, "control", control=Control(_SHORT, "seconds")
    ),
    "random pruning as infobatch": Contestant(
        STATIC, "control", control=Control("infobatch", "sizes")
    ),
    "infobatch, weights of mean 1": Contestant(
        "foresight:prune={value}", "control", "prune", (0.5, 0.25)
    ),
    "infobatch, as many visits": Contestant(
        "infobatch:prune={value}",
        "control",
        "prune",
        (0.5, 0.25),
        control=Control("infobatch", "visits"),
    ),
}


def _is_known(recipe: str) -> bool:
    name, *given = recipe.split(":")
    page = inspect.signature(getattr(recipes, name))
    return all(part.partition("=")[0] in page.parameters for part in given)


CONTESTANTS = {name: one for name, one in _ALL.items() if _is_known(one.recipe)}
"""By name, in the order of the tables; without those that this version of Stoker does not have."""
OF_TRIAL = tuple(CONTESTANTS)
"""Those of the trial itself; what follows is for its confirmation only."""

LENGTH = 13
"""Epochs of those that train longer than the others, in less time each."""
LONGER = "foresight, repeat 6, 13 epochs"
CONTESTANTS |= {
    f"{name}, {LENGTH} epochs": replace(
        CONTESTANTS[name], epochs=LENGTH, like=like and f"{like}, {LENGTH} epochs"
    )
    for name, like in (
        (DEFAULT, None),
        (STATIC, DEFAULT),
        ("infobatch", None),
        ("shade x3, hits first", None),
        ("icache", None),
        ("impact", None),
        (_SHORT, None),
    )
} | {
    LONGER: Contestant("foresight:repeat=6:annealed={value}", "ours", *_OURS, epochs=LENGTH),
    "uniform, seconds of repeat 6": Contestant(
        STATIC, "control", control=Control(LONGER, "seconds"), epochs=LENGTH
    ),
}

MANY = "foresight, repeat 5"
"""What hits 70 % in 16 epochs of 50,000 images, by simulation, with as few repeats as possible."""
CONTESTANTS |= {
    MANY: Contestant("foresight:repeat=5:annealed={value}", "ours", *_OURS),
    "uniform, seconds of repeat 5": Contestant(STATIC, "control", control=Control(MANY, "seconds")),
}
MANY_LONGER = "foresight, repeat 6, 21 epochs"
"""As :data:`LONGER` to ten epochs, so is this to 16: 1.3 times as many, with as many repeats."""
CONTESTANTS |= {
    MANY_LONGER: replace(CONTESTANTS[LONGER], epochs=21),
    "uniform, seconds of repeat 6, 21 epochs": Contestant(
        STATIC, "control", control=Control(MANY_LONGER, "seconds")
    ),
}

SMOKE = (DEFAULT, STATIC, "spidercache", _LONG, "uniform, seconds of repeat 8")


def made(
    one: Contestant, setting: Setting, samples: int, total_bytes: int, batch_size: int
) -> Recipe:
    """Return the recipe of a contestant for data of this size."""
    scale = samples / 50_000  # the data sets of SpiderCache's paper have so many samples
    value = setting.value
    text = one.recipe.format(
        value=int(value) if value is not None and value == int(value) else value,
        cache=CACHE,
        neighbors=max(10, round(500 * scale)),
        degree=min(max(2.0, 50 * scale * (value or 1)), max(10, round(500 * scale)) / 2),
    )
    recipe = fitted(recipes.get(text), total_bytes)
    if isinstance(recipe.policy, Homophily):
        transit = min(0.3, max(0.05, 2 * batch_size / (CACHE * samples)))
        recipe = replace(recipe, policy=replace(recipe.policy, transit=transit))
    return recipe
