"""Recipes by name: one page per known system, a few lines each.

::

    recipe = stoker.recipes.get("s3fifo", small=0.05)  # the same as recipes.s3fifo(small=0.05)
    loader = stoker.Loader(dataset, cache="20%", recipe=recipe)
    loader = stoker.Loader(dataset, cache="20%", recipe="s3fifo:small=0.05")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.errors import ConfigError
from stoker.recipes.base import Recipe
from stoker.recipes.baselines import (
    belady,
    coordl,
    fifo,
    lfu,
    lru,
    minio,
    oracle,
    random,
    s3fifo,
    sieve,
)
from stoker.recipes.contrib import base, ilfu, infobatch, quiver
from stoker.recipes.foresight import foresight
from stoker.recipes.icache import icache
from stoker.recipes.impact import impact
from stoker.recipes.shade import shade
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

    Parameters may stand in the name, as on a command line: ``"foresight:repeat=4:importance=true"``
    is ``get("foresight", repeat=4, importance=True)`` under that longer name.

    Raises :class:`~stoker.errors.ConfigError`, which lists what is known, for an unknown name
    or parameter, or one that is no number where it has to be.
    """
    page_name, *written = name.split(":")
    page = _PAGES.get(page_name)
    if page is None:
        raise ConfigError(f"recipe {page_name!r} is not known: use one of {', '.join(names())}")
    known = inspect.signature(page).parameters
    given = dict(_parameter(text) for text in written)
    if unknown := sorted({*given, *params} - set(known)):
        takes = f"use {', '.join(known)}" if known else "it takes none"
        raise ConfigError(f"recipe {page_name!r} has no parameter {', '.join(unknown)}: {takes}")
    values = {key: _value(key, text, known[key].default) for key, text in given.items()}
    recipe = page(**{**values, **params})
    return replace(recipe, name=name) if written else recipe


def _parameter(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given:
        raise ConfigError(f"parameter {text!r} of a recipe is refused: write it as name=value")
    return name, value


def _value(name: str, text: str, default: Any) -> Any:
    """Return what is written as a value of the kind that ``default`` is."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text} is refused: write true or false")
        return text == "true"
    if default is None and text == "none":
        return None
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        if default is None:  # what is not a number there may be a text
            return text
        raise ConfigError(f"{name}={text} is refused: write a number") from None
