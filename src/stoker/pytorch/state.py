"""The saved state of a Loader: tensors and primitives, and what it may be loaded into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from stoker.errors import StateMismatch
from stoker.pytorch.cursor import Cursor
from stoker.pytorch.meta import Failure
from stoker.pytorch.population import Population
from stoker.pytorch.stats import Stats
from stoker.scores import Scores

VERSION = 1
"""Of the format; a state of another one is refused."""

OWN_ORDER = "own sampler"
"""In the place of a plan's identity where there is no plan."""


class Owner(NamedTuple):
    """What a state belongs to."""

    dataset: str
    """Fingerprint of the data set and, for a Subset, of its ids."""
    num_samples: int
    seed: int
    recipe: str
    plan: str
    """Identity of the plan of the state's epoch, before it is divided; or :data:`OWN_ORDER`."""
    world_size: int


class LoaderState(NamedTuple):
    """All that a Loader needs to go on exactly where another one was."""

    owner: Owner
    cursor: Cursor
    scores: dict[str, torch.Tensor]
    """``values f64[N]``, ``last i64[N]``, ``seen i64[N]``."""
    observed: int
    """Batches observed so far: the steps in ``last``."""
    stats: Stats
    failures: tuple[Failure, ...]
    generator: torch.Tensor | None
    """State that the loader's generator had when the epoch began."""

    def to_dict(self) -> dict[str, Any]:
        """Return what ``torch.load`` reads with its safe default."""
        return {
            "version": VERSION,
            **self.owner._asdict(),
            **self.cursor._asdict(),
            "scores": self.scores,
            "observed": self.observed,
            "stats": self.stats.counts(),
            "quarantine": [list(failure) for failure in self.failures],
            "generator": self.generator,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderState:
        """Return what :meth:`to_dict` gave; entries that others have added are left alone.

        Raises :class:`~stoker.errors.StateMismatch` for another version or missing entries.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != VERSION:
            raise StateMismatch(
                f"this is a state of version {version!r}, and this Stoker reads version {VERSION}: "
                "load it with the Stoker that saved it, or begin anew"
            )
        known = Stats().counts()
        try:
            return cls(
                Owner(**_named(state, Owner._fields)),
                Cursor(**_named(state, Cursor._fields)),
                {name: state["scores"][name] for name in ("values", "last", "seen")},
                int(state["observed"]),
                Stats(**{name: n for name, n in state["stats"].items() if name in known}),
                tuple(Failure(*failure) for failure in state["quarantine"]),
                state["generator"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateMismatch(f"the state is damaged: {error!r}") from error

    def rows(self) -> dict[str, NDArray[Any]]:
        """Return the scores as arrays."""
        return {name: tensor.cpu().numpy() for name, tensor in self.scores.items()}

    def refuse_other(self, owner: Owner, num_scores: int) -> None:
        """Raise :class:`~stoker.errors.StateMismatch` unless a loader of ``owner`` can load it."""
        saved = self.owner
        _refuse("data set", saved.dataset, owner.dataset)
        _refuse("number of samples", saved.num_samples, owner.num_samples)
        for name, tensor in self.scores.items():
            _refuse(f"shape of scores.{name}", tuple(tensor.shape), (num_scores,))
        _refuse("seed", saved.seed, owner.seed)
        if saved.plan != owner.plan:
            _refuse("order", _plan_name(saved), _plan_name(owner))
        if owner.plan == OWN_ORDER:  # how it divides its samples is not known
            _refuse("world_size", saved.world_size, owner.world_size)


def _refuse(what: str, saved: object, here: object) -> None:
    if saved != here:
        raise StateMismatch(
            f"the state was saved with {what} {saved!r} and this loader has {here!r}: make the "
            "loader as it was, or begin anew"
        )


def dataset_name(population: Population) -> str:
    """Return what names the visited samples from one run to the next.

    The fingerprint of the source; for a wrapped data set without a name, its class and length.
    """
    source = population.base.source
    if getattr(source, "is_private", False):
        kind = type(getattr(source, "dataset", source))
        name = f"{kind.__module__}.{kind.__qualname__}-{len(source)}"
    else:
        name = source.fingerprint
    return f"{name}-subset-{population.label}" if population.label else name


def tensors_of(scores: Scores) -> dict[str, torch.Tensor]:
    """Return copies of the rows of ``scores``."""
    return {
        "values": torch.tensor(scores.values),
        "last": torch.tensor(scores.last),
        "seen": torch.tensor(scores.seen),
    }


def _named(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: state[name] for name in names}


def _plan_name(owner: Owner) -> str:
    order = owner.plan if owner.plan == OWN_ORDER else f"plan {owner.plan}"
    return f"{order}, recipe {owner.recipe}"
