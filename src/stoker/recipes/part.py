"""Parts of a recipe that are made once the job is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stoker.errors import ConfigError

Made = TypeVar("Made")


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
