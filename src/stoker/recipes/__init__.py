"""Recipes by name: one page per known system, a few lines each.

::

    recipe = stoker.recipes.get("s3fifo", small=0.05)  # the same as recipes.s3fifo(small=0.05)
    loader = stoker.Loader(dataset, cache="20%", recipe=recipe)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from stoker.errors import ConfigError
from stoker.recipes.base import Recipe
from stoker.recipes.belady import belady
from stoker.recipes.cis import base
from stoker.recipes.coordl import coordl
from stoker.recipes.fifo import fifo
from stoker.recipes.foresight import foresight
from stoker.recipes.icache import icache
from stoker.recipes.ilfu import ilfu
from stoker.recipes.impact import impact
from stoker.recipes.infobatch import infobatch
from stoker.recipes.lfu import lfu
from stoker.recipes.lru import lru
from stoker.recipes.minio import minio
from stoker.recipes.oracle import oracle
from stoker.recipes.quiver import quiver
from stoker.recipes.random import random
from stoker.recipes.s3fifo import s3fifo
from stoker.recipes.shade import shade
from stoker.recipes.sieve import sieve
from stoker.recipes.spidercache import spidercache

__all__ = [
    "Recipe",
    "base",
    "belady",
    "coordl",
    "fifo",
    "foresight",
    "get",
    "icache",
    "ilfu",
    "impact",
    "infobatch",
    "lfu",
    "lru",
    "minio",
    "names",
    "oracle",
    "quiver",
    "random",
    "s3fifo",
    "shade",
    "sieve",
    "spidercache",
]

_PAGES: dict[str, Callable[..., Recipe]] = {
    page.__name__: page
    for page in (
        base,
        belady,
        coordl,
        fifo,
        foresight,
        icache,
        ilfu,
        impact,
        infobatch,
        lfu,
        lru,
        minio,
        oracle,
        quiver,
        random,
        s3fifo,
        shade,
        sieve,
        spidercache,
    )
}


def names() -> list[str]:
    """Return the known names, sorted."""
    return sorted(_PAGES)


def get(name: str, **params: Any) -> Recipe:
    """Return the recipe of that name, with ``params`` in place of its defaults.

    Raises :class:`~stoker.errors.ConfigError`, which lists what is known, for an unknown name
    or parameter.
    """
    page = _PAGES.get(name)
    if page is None:
        raise ConfigError(f"recipe {name!r} is not known: use one of {', '.join(names())}")
    known = list(inspect.signature(page).parameters)
    if unknown := sorted(set(params) - set(known)):
        takes = f"use {', '.join(known)}" if known else "it takes none"
        raise ConfigError(f"recipe {name!r} has no parameter {', '.join(unknown)}: {takes}")
    return page(**params)
