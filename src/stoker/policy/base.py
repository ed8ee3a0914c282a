"""What an eviction policy is: regions with an order, an admission and a pop rule; substitution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.scores import Scores
from stoker.types import check_members

Order = Literal["key", "recency", "frequency", "insertion"]
Admission = Literal["always", "beats_victims", "while_room"]
Pop = Literal["evict", "random", "sieve", "second_chance", "promote"]

MAX_VISITS = 3
"""Where the visit counter of a sample saturates (two bits, as in S3-FIFO)."""

Kind = Literal["low_by_low", "low_by_high", "neighbour", "any"]


@dataclass(frozen=True)
class Region:
    """A named share of the arena, and the rules by which samples enter and leave it.

    A frozen value: safe to share between threads and to pickle. A combination of rules that
    has no meaning raises :class:`~stoker.errors.ConfigError` at construction.
    """

    name: str
    """Unique within the arena, not empty."""
    share: float
    """Budget as a share of the arena's payload bytes, 0 < share <= 1. A region that holds no
    bytes counts the lengths of the samples it remembers against its budget."""
    order: Order = "key"
    """What the smallest key means: the caller's ``key``, the clock of the last access
    (``recency``), the count of accesses and then the clock (``frequency``), or the clock of the
    insertion (``insertion``)."""
    admission: Admission = "always"
    """``always`` evicts as needed; ``beats_victims`` admits a newcomer only if no victim has a
    larger key, and one of key -inf only while there is room; ``while_room`` never evicts."""
    ties: bool = True
    """With ``beats_victims``: a newcomer whose key equals its victim's is admitted."""
    pop: Pop = "evict"
    """What happens to the smallest key: it is evicted (``evict``), a uniformly chosen one is
    (``random``), visited ones get another round (``sieve``) or go to the back of the queue
    (``second_chance``), or visited ones move to another region (``promote``)."""
    visits: int = 0
    """With ``promote``: hits since insertion from which a sample is promoted, 0 to 3."""
    promote_to: str | None = None
    """With ``promote``: the region that promoted samples move to."""
    ghost: str | None = None
    """With ``promote``: the region that remembers evicted ids without their bytes; a put of an
    id found there goes to ``promote_to``."""
    strict: bool = True
    """A strict region never exceeds its budget by a put; one that is not strict may borrow, and
    only the capacity of the arena makes it evict."""
    holds_bytes: bool = True
    """False for a ghost region, which remembers ids only."""

    def __post_init__(self) -> None:
        self._check_words()
        if not 0 < self.share <= 1:
            raise self._refuse("share", self.share, "give a share of the arena, 0 < share <= 1")
        if not isinstance(self.visits, int) or not 0 <= self.visits <= MAX_VISITS:
            raise self._refuse("visits", self.visits, f"give an integer from 0 to {MAX_VISITS}")
        if (self.promote_to is None) != (self.pop != "promote"):
            raise self._refuse(
                "promote_to", self.promote_to, "name the region exactly when pop='promote'"
            )
        if self.ghost is not None and self.pop != "promote":
            raise self._refuse("ghost", self.ghost, "only pop='promote' remembers what it evicts")
        if self.pop in ("sieve", "second_chance") and self.order != "insertion":
            raise self._refuse("order", self.order, f"pop={self.pop!r} needs order='insertion'")
        if not self.holds_bytes and (self.order != "insertion" or self.pop != "evict"):
            raise self._refuse(
                "holds_bytes",
                False,
                "what is remembered is a queue: order='insertion', pop='evict'",
            )
        if self.admission == "beats_victims" and (self.pop != "evict" or not self.strict):
            raise self._refuse(
                "admission", self.admission, "comparing victims needs pop='evict' and strict=True"
            )

    def _check_words(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise self._refuse("name", self.name, "give a name that is not empty")
        for field, allowed in (("order", Order), ("admission", Admission), ("pop", Pop)):
            if getattr(self, field) not in get_args(allowed):
                raise self._refuse(field, getattr(self, field), f"use one of {get_args(allowed)}")

    def _refuse(self, field: str, value: object, way_out: str) -> ConfigError:
        return ConfigError(f"region {self.name!r}: {field}={value!r} is not valid: {way_out}")


class Policy(ABC):
    """Decides what is evicted from the cache; owns no clock, thread, file or socket.

    The same object serves training and the simulator. Implementations keep no mutable state, so
    they may be shared between threads and pickled to other processes. A policy has a ``name``,
    ``regions`` and ``keys``; everything else has a default here. An object that has these three
    without deriving from this class is completed by :func:`as_policy`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name, as recipes spell it."""

    @property
    def natural_keys(self) -> bool:
        """True when the arena's own orders supply every key and ``keys`` returns None."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """Whether keys need a plan."""
        return False

    @property
    def follows_scores(self) -> bool:
        """Whether keys are scores: they change when a score does, not when a sample is hit."""
        return False

    @property
    def keys_are_scores(self) -> bool:
        """Whether a key is the latest score, -inf before there is one, and depends on no more."""
        return False

    @property
    def overflow(self) -> str:
        """The region for samples that their own region does not admit; empty: they are dropped."""
        return ""

    @property
    def shared_request_bytes(self) -> float:
        """What a request costs where other jobs use the cache too, in bytes."""
        return 0.0

    @property
    def has_places(self) -> bool:
        """Whether :meth:`places` decides which region a sample belongs to."""
        return type(self).places is not Policy.places

    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """Regions of the arena; the first one takes puts by default."""

    @abstractmethod
    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64] | None:
        """Return f64[n], one key per id of ``ids`` u32[n]; the smallest key is evicted first.

        ``position`` i64[n]: places in ``plan`` of the accesses after which the keys hold; None:
        they hold from the start of the plan on, before any access. Asked in the training process,
        for coming accesses ahead of time. None as result means that the arena's own order
        supplies the keys.
        """

    def places(self, scores: Scores, plan: Plan, num_samples: int) -> NDArray[np.uint8]:
        """Return u8[N], where each sample belongs in the epoch of ``plan``: an index of a region.

        Called once per epoch. By default all samples belong to the first region.
        """
        return np.zeros(num_samples, np.uint8)

    def for_sizes(self, sizes: NDArray[np.int64]) -> Policy:
        """Return the policy for samples of these sizes i64[N]; by default this one."""
        return self

    def for_batches(self, share: float) -> Policy:
        """Return the policy for batches on their way to the step; by default this one.

        ``share``: their bytes / the bytes of the cache, above 0; may be above 1.
        """
        return self


class NaturalOrder(Policy):
    """Base of the policies whose keys the arena supplies by itself, from its clock."""

    natural_keys: ClassVar[bool] = True

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> None:
        """Return None: recency, frequency or insertion is noted by the arena."""


def as_policy(candidate: Any) -> Policy:
    """Return ``candidate`` as a full policy, with defaults for the optional members it lacks.

    Raises :class:`~stoker.errors.ConfigError`, naming what is missing, when it has not even
    ``name``, ``regions`` and ``keys``.
    """
    if isinstance(candidate, Policy):
        return candidate
    check_members(candidate, "policy", ("name", "regions", "keys"), "stoker.policy.Policy")
    return _Completed(candidate)


@dataclass(frozen=True)
class _Completed(Policy):
    """An object with the required members, completed by the defaults of :class:`Policy`."""

    own: Any

    @property
    def name(self) -> str:
        return str(self.own.name)

    @property
    def natural_keys(self) -> bool:
        return bool(getattr(self.own, "natural_keys", False))

    @property
    def looks_ahead(self) -> bool:
        return bool(getattr(self.own, "looks_ahead", False))

    @property
    def follows_scores(self) -> bool:
        return bool(getattr(self.own, "follows_scores", False))

    @property
    def overflow(self) -> str:
        return str(getattr(self.own, "overflow", ""))

    @property
    def shared_request_bytes(self) -> float:
        return float(getattr(self.own, "shared_request_bytes", 0.0))

    @property
    def has_places(self) -> bool:
        return bool(getattr(self.own, "has_places", hasattr(self.own, "places")))

    def regions(self) -> tuple[Region, ...]:
        return cast(tuple[Region, ...], self.own.regions())

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64] | None:
        keys = self.own.keys(ids, scores, plan, position)
        return cast("NDArray[np.float64] | None", keys)

    def places(self, scores: Scores, plan: Plan, num_samples: int) -> NDArray[np.uint8]:
        places = getattr(self.own, "places", super().places)
        return cast("NDArray[np.uint8]", places(scores, plan, num_samples))

    def for_sizes(self, sizes: NDArray[np.int64]) -> Policy:
        fit = getattr(self.own, "for_sizes", None)
        return self if fit is None else as_policy(fit(sizes))

    def for_batches(self, share: float) -> Policy:
        fit = getattr(self.own, "for_batches", None)
        return self if fit is None else as_policy(fit(share))


@dataclass(frozen=True)
class Substitution:
    """What is served for a sample that is not cached, so that no read is needed.

    The label, the loss and the score belong to the sample served. Immutable. Raises
    :class:`~stoker.errors.ConfigError` for an unknown kind, an empty region, and ``by`` where the
    kind has no use for it, or missing where it has.
    """

    kind: Kind
    """``low_by_low``: for a sample whose place is ``region``, another one cached there whose
    place it is too, each once an epoch (iCache, HPCA 2023). ``low_by_high``: for a sample whose
    place is ``region``, a random one cached in ``by``, as often as that happens (iCache's variant
    ST_HC). ``neighbour``: the key sample in
    ``region`` that serves for it (SpiderCache, ICPP 2025). ``any``: for any sample any other one
    cached in ``region``, each once an epoch (Quiver, FAST 2020)."""
    region: str
    """The region of the cache that substitutes are taken from, unless ``by`` is another."""
    by: str | None = None
    """With ``low_by_high``: the region that substitutes are taken from."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind={self.kind!r} is not known: use one of {get_args(Kind)}")
        if not self.region:
            raise ConfigError("region='' is empty: name a region of the policy")
        if bool(self.by) != (self.kind == "low_by_high"):
            raise ConfigError(
                f"by={self.by!r} is not valid with kind={self.kind!r}: name the region of "
                "substitutes exactly when kind='low_by_high'"
            )

    @property
    def is_once_each(self) -> bool:
        """Whether each sample is to be served once an epoch, in whatever order."""
        return self.kind in ("low_by_low", "any")

    @property
    def has_places(self) -> bool:
        """Whether only samples whose place is :attr:`region` are replaced."""
        return self.kind in ("low_by_low", "low_by_high")

    @property
    def has_claims(self) -> bool:
        """Whether it is recorded which samples were served in the epoch."""
        return self.kind != "neighbour"
