"""Names of recipes as a user gives them on the command line."""

from __future__ import annotations

from stoker import recipes
from stoker.errors import ConfigError


def choose_recipes(names: str) -> list[str]:
    """Return the recipes named in ``"lru,minio"``, or every one for ``"all"``.

    Raises ConfigError, which lists what is known, for an unknown name or none.
    """
    if names == "all":
        return recipes.names()
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        known = ", ".join(recipes.names())
        raise ConfigError(f"--recipes {names!r} names none: use all, or some of {known}")
    for name in chosen:
        recipes.get(name)
    return chosen
