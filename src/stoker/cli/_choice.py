"""Names of recipes as a user gives them on the command line."""

from __future__ import annotations

from stoker import recipes
from stoker.errors import ConfigError
from stoker.sampler.base import as_sampler

DATALOADER = "dataloader"
"""Names torch's own DataLoader, without a cache, beside the recipes of Stoker's Loader."""


def choose_recipes(names: str, *, is_trained: bool = True) -> list[str]:
    """Return the recipes named in ``"lru,minio"``, or for ``"all"`` those that keep to the cache.

    The oracle, which caches everything whatever the size, does not: it has to be named. Without
    training, ``is_trained=False``, recipes that learn from it are left out, and always those
    whose libraries are not installed. Raises ConfigError,
    which lists what is known, for an unknown name, for none, or for one that has to be trained.
    """
    if names == "all":
        kept = [name for name in recipes.names() if not recipes.get(name).preload]
        return [n for n in kept if (is_trained or not _learns(n)) and _is_installed(n)]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        known = ", ".join(recipes.names())
        raise ConfigError(f"--recipes {names!r} names none: use all, or some of {known}")
    for name in chosen:
        recipes.get(name)
        if not is_trained and _learns(name):
            raise ConfigError(
                f"recipe {name!r} follows what training shows, and there is none here: "
                "use stoker demo"
            )
    return chosen


def choose_loaders(names: str, *, with_dataloader: bool) -> list[str]:
    """Return the recipes named in ``names``, after DATALOADER if that is wanted.

    ``"dataloader"`` may be among the names; alone it stands for no recipe at all. Raises
    ConfigError as :func:`choose_recipes` does, and where what is named is not wanted.
    """
    given = [name.strip() for name in names.split(",")]
    if DATALOADER not in given:
        return [DATALOADER] * with_dataloader + choose_recipes(names)
    if not with_dataloader:
        raise ConfigError(f"--recipes {names!r} names {DATALOADER!r}: leave out --no-dataloader")
    rest = ",".join(name for name in given if name and name != DATALOADER)
    return [DATALOADER, *(choose_recipes(rest) if rest else [])]


def _is_installed(name: str) -> bool:
    """Whether the libraries that a recipe scores with are there."""
    try:
        recipes.get(name).scorer(1)
    except ConfigError:
        return False
    return True


def _learns(name: str) -> bool:
    """Whether what a recipe visits, keeps or serves depends on what training shows of samples."""
    recipe = recipes.get(name)
    made = recipe.sampler(1, seed=0, shuffle=True, pad_to=1, drop_last=False, epochs=1)
    follows = recipe.policy.follows_scores
    return follows or recipe.substitution is not None or as_sampler(made).uses_scores
