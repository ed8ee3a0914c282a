"""Arguments of a Loader that make no sense, or not yet."""

from __future__ import annotations

from typing import Any

from stoker.errors import ConfigError
from stoker.pytorch.planner import looks_ahead
from stoker.recipes.base import Recipe, uniform


def refuse_unavailable(**given: Any) -> None:
    """Raise ConfigError for an argument, by its name, that is given and does nothing yet."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}={value!r}: this version has no {name} yet, leave it out")


def check_epochs(epochs: int | None) -> None:
    """Raise ConfigError unless it is None or a count of epochs."""
    if epochs is not None and (isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1):
        raise ConfigError(f"epochs={epochs!r} is refused: give how many there will be, 1 or more")


def check_own_order(recipe: Recipe) -> None:
    """Raise ConfigError unless ``recipe`` goes with a sampler of the user's."""
    if recipe.sampler is not uniform:
        raise ConfigError(
            f"recipe {recipe.name!r} draws samples itself: leave out sampler and batch_sampler, "
            "or use a recipe that only caches, like 'minio'"
        )
    if looks_ahead(recipe.policy):
        raise ConfigError(
            f"recipe {recipe.name!r} needs a plan, which a sampler does not give: leave out "
            "sampler and batch_sampler, or use a recipe like 'minio'"
        )
