"""Recipes for mixtures of sources: what is cached as usual, visited as the mixture says."""

from __future__ import annotations

from dataclasses import replace

from stoker.errors import ConfigError
from stoker.policy.next_use import InPasses, OnceAnEpoch
from stoker.recipes.base import Recipe, part, uniform
from stoker.sampler.mixture import Mixture, MixtureSampler


def mixed(recipe: Recipe, mixture: Mixture) -> Recipe:
    """Return ``recipe`` for a mixture, for a Loader or Feed of it, or ``stoker.sim.replay``.

    ``foresight`` keeps the sources whose samples come most often
    (:class:`~stoker.policy.next_use.InPasses`). Raises :class:`~stoker.errors.ConfigError` for a
    recipe that chooses samples itself, or serves others in their place.
    """
    policy, is_once = recipe.policy, type(recipe.policy) is OnceAnEpoch
    if not (is_once or recipe.sampler is uniform) or recipe.substitution is not None:
        raise ConfigError(
            f"recipe {recipe.name!r} chooses samples itself, and so does a mixture: use a recipe "
            "that only caches, like 'foresight' or 'lru'"
        )
    if isinstance(policy, OnceAnEpoch) and is_once:
        policy = InPasses(policy.request_bytes)
    sampler = part(mixture_sampler, mixture=mixture, looks_ahead=policy.looks_ahead)
    return replace(recipe, policy=policy, sampler=sampler, fit_sampler=None, limit=None)


def mixture_sampler(
    num_samples: int,
    *,
    seed: int,
    shuffle: bool,
    pad_to: int,
    drop_last: bool,
    epochs: int | None,
    mixture: Mixture,
    looks_ahead: bool,
) -> MixtureSampler:
    """Return the sampler of ``mixture``; :class:`~stoker.recipes.base.SamplerFactory`.

    Raises :class:`~stoker.errors.ConfigError` where ``num_samples`` is not that of all sources, and
    without ``shuffle``.
    """
    if num_samples != sum(mixture.lengths):
        raise ConfigError(
            f"{num_samples} samples, and the mixture is of {sum(mixture.lengths)}: give as many"
        )
    if not shuffle:
        raise ConfigError("a mixture is drawn at random: leave shuffle out")
    return MixtureSampler(mixture, seed, pad_to, drop_last, looks_ahead)
