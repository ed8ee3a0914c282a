"""Names of recipes as a user gives them on the command line."""

from __future__ import annotations

from stoker import recipes
from stoker.errors import ConfigError


def choose_recipes(names: str) -> list[str]:
    """Return the recipes named in ``"lru,minio"``, or for ``"all"`` those that keep to the cache.

    The oracle, which caches everything whatever the size, does not: it has to be named.
    Raises ConfigError, which lists what is known, for an unknown name or none.
    """
    if names == "all":
        return [name for name in recipes.names() if not recipes.get(name).preload]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        known = ", ".join(recipes.names())
        raise ConfigError(f"--recipes {names!r} names none: use all, or some of {known}")
    for name in chosen:
        recipes.get(name)
    return chosen
