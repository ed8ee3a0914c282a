"""Recipes by name: one page per known system, a few lines each.

::

    loader = stoker.Loader(dataset, cache="20%", recipe=stoker.recipes.s3fifo(small=0.05))
    loader = stoker.Loader(dataset, cache="20%", recipe="s3fifo:small=0.05")  # the same, as text
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.errors import ConfigError
from stoker.recipes.base import Recipe, Same, mixed, part
from stoker.recipes.baselines import (
    base_cis,
    belady,
    fifo,
    ilfu,
    infobatch,
    lfu,
    lru,
    minio,
    oracle,
    quiver,
    random,
    s3fifo,
    sieve,
)
from stoker.recipes.foresight import foresight
from stoker.recipes.icache import icache
from stoker.recipes.impact import impact
from stoker.recipes.shade import shade
from stoker.recipes.spidercache import spidercache

__all__ = [
    "Recipe",
    "Same",
    "base_cis",
    "belady",
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
    "mixed",
    "names",
    "oracle",
    "part",
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
        base_cis,
        belady,
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


def get(text: str) -> Recipe:
    """Return the recipe that ``text`` names, as on a command line.

    After the name may stand parameters in place of its defaults:
    ``"foresight:repeat=4:importance=true"`` is ``foresight(repeat=4, importance=True)`` under that
    longer name.

    Raises :class:`~stoker.errors.ConfigError`, which lists what is known, for an unknown name
    or parameter, or one that is no number where it has to be.
    """
    name, *written = text.split(":")
    page = _PAGES.get(name)
    if page is None:
        raise ConfigError(f"recipe {name!r} is not known: use one of {', '.join(names())}")
    known = inspect.signature(page).parameters
    given = dict(_parameter(part) for part in written)
    if unknown := sorted(given.keys() - set(known)):
        takes = f"use {', '.join(known)}" if known else "it takes none"
        raise ConfigError(f"recipe {name!r} has no parameter {', '.join(unknown)}: {takes}")
    recipe = page(**{key: _value(key, part, known[key].default) for key, part in given.items()})
    return replace(recipe, name=text) if written else recipe


def as_recipe(recipe: str | Recipe | None, *, is_planned: bool = True) -> Recipe:
    """Return the recipe of that text, or the recipe itself; ConfigError for anything else.

    None is the default: ``foresight``, or ``minio`` where the coming accesses are not planned.
    """
    if recipe is None:
        return foresight() if is_planned else minio()
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get(recipe)
    known = ", ".join(names())
    raise ConfigError(f"recipe={recipe!r} is neither a Recipe nor a name: use one of {known}")


def _parameter(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given:
        raise ConfigError(f"parameter {text!r} of a recipe cannot be read: write it as name=value")
    return name, value


def _value(name: str, text: str, default: Any) -> Any:
    """Return what is written as a value of the kind that ``default`` is."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text} is not a truth value: write true or false")
        return text == "true"
    if default is None and text == "none":
        return None
    try:
        is_whole = isinstance(default, int) or (default is None and text.isdecimal())
        return int(text) if is_whole else float(text)
    except ValueError:
        if default is None:  # what is not a number there may be a text
            return text
        raise ConfigError(f"{name}={text} is not a number: write a number") from None
