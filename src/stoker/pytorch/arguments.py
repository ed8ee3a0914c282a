"""Arguments of a Loader that make no sense, or not yet."""

from __future__ import annotations

from typing import Any

from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.recipes.base import Recipe, uniform


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
    if recipe.needs_plan:
        raise ConfigError(
            f"recipe {recipe.name!r} needs a plan, which a sampler does not give: leave out "
            "sampler and batch_sampler, or use a recipe like 'minio'"
        )


def check_rescore(rescore: Any, recipe: Recipe, scorer: Scorer) -> None:
    """Raise ConfigError unless ``rescore`` is a function that ``recipe`` has a use for, or None."""
    if rescore is None:
        return
    if not callable(rescore):
        raise ConfigError(f"rescore={rescore!r} is no function: give one from a batch to losses")
    if not hasattr(scorer, "volatile"):
        raise ConfigError(
            f"rescore= is of no use to recipe {recipe.name!r}, which scores nothing anew: leave it "
            "out, or use a recipe like 'impact'"
        )
    if others := scorer.needs - {"losses"}:
        raise ConfigError(
            f"rescore= gives losses, and recipe {recipe.name!r} scores by {', '.join(others)}: "
            "leave it out, or use a scorer of losses"
        )


def follows_scores(recipe: Recipe, is_sampled_by_scores: bool) -> bool:
    """Whether anything of ``recipe`` depends on scores, and ranks have to agree on them."""
    policy = recipe.policy
    return (
        is_sampled_by_scores
        or recipe.shares is not None
        or hasattr(policy, "places")
        or bool(getattr(policy, "follows_scores", False))
    )
