"""The saved state of a training's rank: arrays and primitives, and what it may be loaded into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.epoch.batch import Failure
from stoker.epoch.planner import Cursor
from stoker.epoch.stats import Stats
from stoker.errors import StateMismatch
from stoker.source.base import Source
from stoker.store.claims import NOBODY

VERSION = 3
"""Of the format; a state of another one raises StateMismatch."""

Arrays = dict[str, NDArray[Any]]
"""Arrays by name."""

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
    rank: int
    world_size: int


class RankState(NamedTuple):
    """All that one rank needs to resume exactly where another run was."""

    owner: Owner
    cursor: Cursor
    served: NDArray[np.uint32] | None
    """``u32[cursor.consumed]``, what all ranks were really served in the epoch, NOBODY where that
    is not known here; None: what the plan has there."""
    has_begun: bool
    """Whether the plan of the cursor's epoch was made already."""
    scores: Arrays
    """What :meth:`Scores.arrays <stoker.scores.Scores.arrays>` returns."""
    observed: int
    """Batches observed so far: the steps in ``last``."""
    losses: tuple[float, int]
    """Sum and number of the losses that are in no epoch's record yet."""
    agreed: Arrays | None
    """Likewise, of what all ranks held when the latest epoch began; None if not requested."""
    ended: tuple[int, float, float, float] | None
    """An epoch that is in no record yet, and the accuracy after it, NaN if not known."""
    is_uniform: bool
    """Whether plans are uniform because training does not play its part."""
    accesses: dict[str, int]
    """Accesses by region in the epoch before the one whose plan is made or comes next."""
    scorer: Arrays | None
    """The scorer's own state, if it has one."""
    backward: Arrays | None
    """Likewise, of what chooses the samples that are learned from."""
    stats: Stats
    failures: tuple[Failure, ...]
    generator: NDArray[np.uint8] | None
    """State that the framework's own generator had when the epoch began, if one is in use."""
    planned_bytes: int | None = None
    """Size of the cache that plans were chosen for, and are again; None: they are for any size, or
    for the one at hand."""
    by_source: dict[str, list[int]] | None = None
    """What was counted of each source of a mixture, by name; None: there is one source."""

    def to_dict(self, stored: Callable[[NDArray[Any]], Any] = np.asarray) -> dict[str, Any]:
        """Return primitives and arrays in dicts and lists; each array is passed to ``stored``.

        Arrays are copies, and signed where they are of integers: not every framework has others.
        """
        fields = self._asdict()
        owner, cursor = fields.pop("owner"), fields.pop("cursor")
        fields["stats"] = self.stats.counts()
        fields["ended"] = None if self.ended is None else list(self.ended)
        fields["losses"] = list(self.losses)
        if self.served is not None:
            fields["served"] = stored(self.served.astype("u4").view("i4"))
        if self.generator is not None:
            fields["generator"] = stored(self.generator.copy())
        fields["quarantine"] = [list(failure) for failure in fields.pop("failures")]
        for name in _ARRAYS:
            if fields[name] is not None:
                fields[name] = {key: stored(_signed(row)) for key, row in fields[name].items()}
        return {"version": VERSION, **owner._asdict(), **cursor._asdict(), **fields}

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], loaded: Callable[[Any], NDArray[Any]] = np.asarray
    ) -> RankState:
        """Return what :meth:`to_dict` gave; entries that others have added are left alone.

        ``loaded`` is the inverse of ``stored`` there. Raises
        :class:`~stoker.errors.StateMismatch` for another version or missing entries.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != VERSION:
            raise StateMismatch(
                f"this is a state of version {version!r}, and this Stoker reads version {VERSION}: "
                "load it with the Stoker that saved it, or start a new run"
            )
        known = Stats().counts()
        try:
            arrays = {name: _loaded(state[name], loaded) for name in _ARRAYS}
            generator = state["generator"]
            return cls(
                owner=Owner(**_named(state, Owner._fields)),
                cursor=Cursor(**_named(state, Cursor._fields)),
                stats=Stats(**{name: n for name, n in state["stats"].items() if name in known}),
                failures=tuple(Failure(*failure) for failure in state["quarantine"]),
                losses=(float(state["losses"][0]), int(state["losses"][1])),
                served=_served(state["served"], int(state["consumed"]), loaded),
                generator=None if generator is None else loaded(generator),
                planned_bytes=None if (size := state.get("planned_bytes")) is None else int(size),
                by_source=_by_source(state.get("by_source")),
                scores=arrays.pop("scores") or {},
                **arrays,
                **_named(state, _PLAIN),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateMismatch(f"the state is damaged: {error!r}") from error

    def refuse_other(self, owner: Owner, num_scores: int) -> None:
        """Raise :class:`~stoker.errors.StateMismatch` unless a loader of ``owner`` can load it."""
        saved = self.owner
        _refuse("data set", saved.dataset, owner.dataset)
        _refuse("number of samples", saved.num_samples, owner.num_samples)
        for name in ("values", "last", "seen"):
            _refuse(f"shape of scores.{name}", self.scores[name].shape, (num_scores,))
        ids = np.empty(0, np.uint32) if self.served is None else self.served
        if ((ids >= num_scores) & (ids != NOBODY)).any():
            raise StateMismatch(f"the state is damaged: there are {num_scores} samples")
        _refuse("seed", saved.seed, owner.seed)
        if saved.plan != owner.plan:
            _refuse("order", _plan_name(saved), _plan_name(owner))
        if owner.plan == OWN_ORDER:  # how it divides its samples is not known
            _refuse("world_size", saved.world_size, owner.world_size)


_ARRAYS = ("scores", "agreed", "scorer", "backward")
_PLAIN = ("has_begun", "observed", "ended", "is_uniform", "accesses")


def _refuse(what: str, saved: object, here: object) -> None:
    if saved != here:
        raise StateMismatch(
            f"the state was saved with {what} {saved!r} and this loader has {here!r}: make the "
            "loader as it was, or start a new run"
        )


def dataset_name(source: Source, label: str) -> str:
    """Return what names the visited samples of ``source`` from one run to the next.

    The fingerprint; for a wrapped data set without a name, its class and length. ``label`` is
    :attr:`Population.label <stoker.epoch.settings.Population.label>`.
    """
    if source.is_private:
        kind = type(getattr(source, "dataset", source))
        name = f"{kind.__module__}.{kind.__qualname__}-{len(source)}"
    else:
        name = source.fingerprint
    return f"{name}-subset-{label}" if label else name


def _signed(row: NDArray[Any]) -> NDArray[Any]:
    """Return a copy, of unsigned integers as signed ones."""
    return row.astype("i8" if row.dtype.kind == "u" else row.dtype)


def _loaded(rows: Mapping[str, Any] | None, loaded: Callable[[Any], NDArray[Any]]) -> Any:
    return None if rows is None else {name: loaded(row) for name, row in rows.items()}


def _served(
    row: Any, consumed: int, loaded: Callable[[Any], NDArray[Any]]
) -> NDArray[np.uint32] | None:
    if row is None:
        return None
    ids = np.ascontiguousarray(loaded(row), np.int32).view(np.uint32)
    if ids.shape != (consumed,):
        raise ValueError(f"{ids.shape} samples served, and {consumed} handed out")
    return ids


def _by_source(counts: Mapping[str, Any] | None) -> dict[str, list[int]] | None:
    return None if counts is None else {name: [*map(int, row)] for name, row in counts.items()}


def _named(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: state[name] for name in names}


def _plan_name(owner: Owner) -> str:
    order = owner.plan if owner.plan == OWN_ORDER else f"plan {owner.plan}"
    return f"{order}, recipe {owner.recipe}"
