"""Arguments of a Loader that make no sense, or not yet."""

from __future__ import annotations

from typing import Any

from stoker.epoch.warn import warn_caller
from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.recipes.base import Recipe, uniform


def check_epochs(epochs: int | None) -> None:
    """Raise ConfigError unless it is None or a count of epochs."""
    if epochs is not None and (isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1):
        raise ConfigError(f"epochs={epochs!r}: give how many there will be, 1 or more")


def check_accuracy(accuracy: Any) -> float:
    """Return an accuracy as a float; ConfigError unless it is a share from 0 to 1."""
    value = float(accuracy)
    if 0 <= value <= 1:
        return value
    hint = f": if that is per cent, give {value / 100:g}" if 1 < value <= 100 else ""
    raise ConfigError(f"accuracy={value:g} is not a share: give a share from 0 to 1{hint}")


def check_known_end(recipe: Recipe, epochs: int | None) -> None:
    """Warn if ``recipe`` divides its cache by the progress of a training of unknown length."""
    without = "" if recipe.shares is None else recipe.shares.without_epochs
    if epochs is None and without:
        warn_caller(
            f"recipe {recipe.name!r} goes by how far training is, and does not know how long it "
            f"will be: {without}. Give the Loader epochs="
        )


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


def as_scored(recipe: Recipe, rescore: Any) -> Recipe:
    """Return what ``recipe`` is with ``rescore``, a function or None; warns if it lacks one."""
    if rescore is not None or recipe.unscored is None:
        return recipe
    warn_caller(
        f"recipe {recipe.name!r} rescores samples between epochs, and there is no function to "
        "do it: samples keep the score of their last visit, and the cache has no region for those "
        "to be scored. Give the Loader rescore=, a function from a batch to its losses, or choose "
        "that by stoker.recipes.impact(evaluation='history')"
    )
    return recipe.unscored


def check_rescore(rescore: Any, recipe: Recipe, scorer: Scorer) -> None:
    """Raise ConfigError unless ``rescore`` is a function that ``recipe`` has a use for, or None.

    Warns where it is None and ``recipe`` would have a use for it.
    """
    if rescore is None:
        if scorer.rescores:
            warn_caller(
                f"recipe {recipe.name!r} rescores samples between epochs, and there "
                "is no function to do it: they keep the score of their last visit. Give the "
                "Loader rescore=, a function from a batch to its losses"
            )
        return
    if not callable(rescore):
        raise ConfigError(f"rescore={rescore!r} is no function: give one from a batch to losses")
    if not scorer.rescores:
        raise ConfigError(
            f"rescore= is of no use to recipe {recipe.name!r}, which rescores nothing: leave it "
            "out, or use a recipe like 'impact'"
        )
    if others := scorer.needs - {"losses"}:
        raise ConfigError(
            f"rescore= gives losses, and recipe {recipe.name!r} scores by {', '.join(others)}: "
            "leave it out, or use a scorer of losses"
        )


def without_accuracy(recipe: Recipe) -> str:
    """Return what becomes of the cache where no accuracy is told; empty if that is no matter."""
    return "" if recipe.shares is None else recipe.shares.without_accuracy


def needs_scores(recipe: Recipe) -> bool:
    """Whether the cache of ``recipe`` depends on scores, even if its plans do not."""
    policy = recipe.policy
    return recipe.shares is not None or policy.has_places or policy.follows_scores
