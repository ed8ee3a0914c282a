"""What a recipe is, its parts, and what becomes of it for one mixture, one cache, one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.bundles.packager import Packaging
from stoker.errors import ConfigError
from stoker.importance.base import Scorer
from stoker.importance.baselines import LossHistory, SelectiveBackward
from stoker.node.bandwidth import FetchShare
from stoker.policy.base import Policy, Substitution, as_policy
from stoker.policy.next_use import InPasses, OnceAnEpoch
from stoker.policy.shares import Shares, as_shares
from stoker.sampler.base import Sampler
from stoker.sampler.mixture import Mixture, MixtureSampler
from stoker.sampler.super_epochs import Room
from stoker.sampler.uniform import UniformSampler
from stoker.shared import SharedArray
from stoker.source.base import Source
from stoker.store.claims import Claims
from stoker.store.store import Store
from stoker.store.substitutes import StandIns
from stoker.store.tier import RegionTier

Made = TypeVar("Made")


class SamplerFactory(Protocol):
    """Makes the sampler of one job once the loader knows the data set and the ranks."""

    def __call__(
        self,
        num_samples: int,
        *,
        seed: int,
        shuffle: bool,
        pad_to: int,
        drop_last: bool,
        epochs: int | None,
    ) -> Sampler:
        """Return a sampler over ids ``0..num_samples-1``; ``epochs`` in all, None if not known."""
        ...


def uniform(
    num_samples: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    pad_to: int = 1,
    drop_last: bool = False,
    epochs: int | None = None,
) -> UniformSampler:
    """Return the sampler that visits each sample once in each epoch, however many there are."""
    return UniformSampler(num_samples, seed, shuffle, pad_to, drop_last)


def loss_history(num_samples: int) -> Scorer:
    """Return the scorer whose scores are the latest losses."""
    return LossHistory()


@dataclass(frozen=True)
class Recipe:
    """What a known system is made of, under one name. Immutable; safe to share and to pickle.

    A part with state, like a scorer, is given as a function that makes it, so that two loaders may
    share a recipe. Raises :class:`~stoker.errors.ConfigError` for packages without
    substitution.
    """

    name: str
    """What :func:`stoker.recipes.get` knows it by."""
    description: str
    """One line for tables and ``--help``."""
    policy: Policy
    """What is evicted from the cache."""
    sampler: SamplerFactory = uniform
    """Which samples are visited, and in which order."""
    fit_sampler: Callable[[SamplerFactory, Room], SamplerFactory] | None = None
    """Makes the sampler's factory one for a cache whose size is known; None: it is for any."""
    scorer: Callable[[int], Scorer] = loss_history
    """Makes, for so many samples, what turns the signals of training into scores."""
    backward: Callable[[], SelectiveBackward] | None = None
    """Makes the choice of samples in a batch that are learned from; None: all of them."""
    substitution: Substitution | None = None
    """Which cached samples may be served in place of others; None: every sample is itself."""
    shares: Shares | None = None
    """Divides the cache again among the policy's regions in each epoch; None: shares stay fixed."""
    packaging: Packaging | None = None
    """The packages that fill the region whose samples are replaced, which are those of a place;
    None: none."""
    limit: Callable[[float], float] | None = None
    """Cache share (0..1, of the data set's bytes) -> byte hit ratio in the steady state."""
    unscored: Recipe | None = None
    """The recipe to use where samples are not scored again between epochs; None: this one."""
    preload: bool = False
    """Whether the cache has room for all samples, whatever size was requested, and begins full."""

    def __post_init__(self) -> None:
        # The class is frozen for its users; what they wrote without our base classes is completed.
        object.__setattr__(self, "policy", as_policy(self.policy))
        if self.shares is not None:
            object.__setattr__(self, "shares", as_shares(self.shares))
        if self.packaging is not None and (
            self.substitution is None or not self.substitution.has_places
        ):
            raise ConfigError(
                f"recipe {self.name!r} has packages without substitution: give it "
                "Substitution('low_by_low', region), whose region they fill"
            )

    @property
    def needs_plan(self) -> bool:
        """Whether the cache needs to know the coming accesses of all ranks."""
        parts = (self.substitution, self.shares, self.packaging)
        plans = self.policy.looks_ahead or self.policy.has_places
        return plans or any(part is not None for part in parts)

    def sampler_for(self, room: Room) -> SamplerFactory:
        """Return :attr:`sampler` for a cache whose size is known, the same on all ranks."""
        return self.sampler if self.fit_sampler is None else self.fit_sampler(self.sampler, room)

    def predicted_hit_ratio(self, cache_fraction: float) -> float | None:
        """Return the byte hit ratio to expect from the second epoch on, or None if unknown.

        ``cache_fraction`` is cache bytes / data set bytes; above 1 counts as 1. Holds for
        uniform epochs without repeats over many samples, each small against the cache. Raises
        :class:`~stoker.errors.ConfigError` for a negative share.
        """
        if not cache_fraction >= 0:
            raise ConfigError(f"cache_fraction={cache_fraction!r} is not a share: use 0 or more")
        if self.limit is None:
            return None
        return self.limit(min(1.0, cache_fraction))


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
    sampler = part(_mixture_sampler, mixture=mixture, looks_ahead=policy.looks_ahead)
    return replace(recipe, policy=policy, sampler=sampler, fit_sampler=None, limit=None)


def _mixture_sampler(
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
    """Return the sampler of ``mixture``, as a :class:`SamplerFactory` does.

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


class Fitted(NamedTuple):
    """A recipe that was told how large its cache is."""

    recipe: Recipe
    """With packages of a size that goes with the cache, if it has any."""
    shares: Shares | None
    """What divides the cache."""
    least_low: int
    """Bytes that the region of packages has at least; 0 where there are none."""


def fit(
    recipe: Recipe, capacity: int, sizes: NDArray[np.int64], *, least_package: int = 0
) -> Fitted:
    """Return ``recipe`` for a cache of ``capacity`` bytes and samples of ``sizes`` (``i64[N]``).

    Its packages have ``least_package`` bytes at least. Raises
    :class:`~stoker.errors.ConfigError` for a cache too small for one.
    """
    packaging, shares = recipe.packaging, recipe.shares
    if packaging is None or not capacity:
        return Fitted(recipe, shares, 0)
    packaging = packaging.fitted(capacity)
    packaging = replace(packaging, min_bytes=max(packaging.min_bytes, least_package))
    recipe = replace(recipe, packaging=packaging)
    if shares is None:
        return Fitted(recipe, shares, 0)
    least = packaging.least_region_bytes(sizes)
    divided = shares.for_cache(capacity, least)
    return Fitted(recipe, shares, 0) if divided is None else Fitted(recipe, divided, least)


def make_store(
    recipe: Recipe,
    policy: Policy,
    source: Source,
    tier: RegionTier,
    *,
    has_places: bool = False,
    claims: Claims | None = None,
    stand_ins: StandIns | None = None,
    originals: Source | None = None,
    fetch_share: FetchShare | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """Return the store over ``tier``, with what the recipe's places and substitution need.

    ``policy`` is the recipe's, as it was fitted to the job. ``has_places``: there are places even
    if the policy gives none. The other arguments are those of :class:`~stoker.store.Store`.
    """
    num_samples = len(source)
    places = packaged = None
    if has_places or policy.has_places:
        places = SharedArray.create(num_samples, np.uint8, name="stoker-places")
    if recipe.packaging is not None:
        packaged = SharedArray.create(num_samples, np.uint8, name="stoker-packaged")
    return Store(
        source,
        tier,
        places=places,
        substitution=recipe.substitution,
        stand_ins=stand_ins,
        packaged=packaged,
        claims=claims,
        originals=originals,
        fetch_share=fetch_share,
        follows_scores=policy.follows_scores,
        clock=clock,
    )


@dataclass(frozen=True)
class Part(Generic[Made]):
    """A maker with some parameters set, to be called with what only the loader knows.

    Unlike ``functools.partial`` it is a value: equal parts compare equal, and so do recipes.
    Made by :func:`part`.
    """

    maker: Callable[..., Made]
    """A class or function."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Names and values, as keyword arguments."""

    def __call__(self, *args: Any, **more: Any) -> Made:
        """Return what the maker makes of both; raises what it raises."""
        return self.maker(*args, **dict(self.parameters), **more)


def part(maker: Callable[..., Made], **parameters: Any) -> Part[Made]:
    """Return ``maker`` with ``parameters`` set: ``part(SelectiveSampler, beta=0.33)``."""
    return Part(maker, tuple(parameters.items()))


@dataclass(frozen=True)
class Same(Generic[Made]):
    """Returns one value for every job: for parts without state, like ``Same(LossHistory())``."""

    value: Made

    def __call__(self, *args: Any, **more: Any) -> Made:
        """Return the value."""
        return self.value


def choose(name: str, value: str, known: Mapping[str, Made]) -> Made:
    """Return what a parameter of a recipe stands for; ConfigError, which lists them, if unknown."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known: use one of {', '.join(known)}")
    return known[value]
