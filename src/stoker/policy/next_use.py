"""Next use: the plan is known, so the sample that is needed latest is evicted first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.plan import Plan
from stoker.policy.base import Policy, Region
from stoker.scores import Scores


@dataclass(frozen=True)
class NextUse(Policy):
    """Belady's rule with a cost: key = -(time to next use) x size / cost of fetching it again.

    With ``request_bytes=0`` a sample costs its bytes, and this is Belady's MIN (IBM Systems
    Journal 1966), which NoPFS (SC 2021) applies to training. ``request_bytes`` is what a request
    costs on top, in bytes (latency x bandwidth, or bandwidth / IOPS): then small samples, of
    which more fit, are worth more. A newcomer enters only if it is needed before every victim.

    With a cost, times count from the start of the plan, so the keys of what is cached have to be
    computed again for each plan. Raises :class:`~stoker.errors.ConfigError` for a negative cost.
    """

    name: ClassVar[str] = "next_use"
    looks_ahead: ClassVar[bool] = True

    request_bytes: float = 0.0
    """Cost of a request in addition to its bytes, in bytes, 0 or more."""
    sizes: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    """``i64[N]``, bytes of each sample; needed with ``request_bytes``, given by the loader."""

    def __post_init__(self) -> None:
        if not self.request_bytes >= 0:
            raise ConfigError(f"request_bytes={self.request_bytes} is out of range: give 0 or more")

    @property
    def shared_request_bytes(self) -> float:
        """What a request costs where other jobs use the cache too, in bytes."""
        return self.request_bytes

    def regions(self) -> tuple[Region, ...]:
        """One region ordered by our keys, whose newcomers must beat their victims."""
        return (Region("main", 1.0, order="key", admission="beats_victims", ties=False),)

    def for_sizes(self, sizes: NDArray[np.int64]) -> NextUse:
        """Return this policy for samples of these sizes."""
        return replace(self, sizes=sizes)

    def keys(
        self,
        ids: NDArray[np.uint32],
        scores: Scores | None,
        plan: Plan | None,
        position: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return f64[n]: minus the time of the next use, in accesses, weighted if there is a cost.

        ``position`` i64[n] are the accesses after which it is sought; None: from the start on.
        Without a plan all keys are 0.
        """
        if plan is None or not len(ids):
            return np.zeros(len(ids))
        return self.keys_at(ids, plan, self._upcoming(ids, plan, position))

    def _upcoming(
        self, ids: NDArray[np.uint32], plan: Plan, position: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return i64[n], the places in ``plan`` at which samples are used next."""
        if position is not None:
            return plan.next_use[position]
        ends = [int(part.max()) + 1 for part in (ids, plan.ids) if len(part)]
        if plan.following is not None and len(plan.following):
            ends.append(int(plan.following.ids.max()) + 1)
        return plan.first_use(max(ends))[ids]

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n], the keys of samples used next at ``upcoming`` i64[n], places in ``plan``.

        While no other job uses the cache; else see :meth:`keys_after`.
        """
        return self._keys_of(ids, plan, upcoming.astype(np.float64))

    def _keys_of(
        self, ids: NDArray[np.uint32], plan: Plan, times: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return f64[n], the keys of samples used next at ``times`` f64[n] in ``plan``, reused."""
        if self.request_bytes == 0 or self.sizes is None:
            times += plan.start
            return np.negative(times, out=times)
        return self.keys_after(ids, times)

    def keys_after(
        self, ids: NDArray[np.uint32], times: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return f64[n], the keys of samples that are used after ``times`` f64[n], of any unit."""
        if self.request_bytes == 0 or self.sizes is None:
            return -times
        sizes = np.maximum(self.sizes[ids], 1)
        return -times * sizes / (self.request_bytes + sizes)


_SHARED = 0.1  # of a mean sample: more samples hit, for few bytes (docs/foresight.md)
_ALONE = 2.0**24  # so that keys from before a job came lose to those of all jobs, in seconds


@dataclass(frozen=True)
class OnceAnEpoch(NextUse):
    """Next use for one visit per sample and epoch: a fixed set, the one that saves most requests.

    Each cached byte then serves one byte an epoch, whichever it is, and keeping what is used
    soonest in the next epoch gains nothing: its hits come in one run as the epoch begins, during
    which storage idles when the prefetch window is full. So times count in whole epochs: what this
    one still needs outranks what it does not, and otherwise the key is -size / cost. The smallest
    samples stay, as many as the cache can hold, and with ``request_bytes=0`` or equal
    sizes those that came first, as in MinIO (CoorDL, VLDB 2021).

    Where other jobs use the cache too, it should hold what one of them needs soon, so the keys are
    those of :class:`NextUse`. Keeping small samples then costs bytes, so a request counts as a
    tenth of a sample of mean size at most. Raises :class:`~stoker.errors.ConfigError` for a
    negative cost.
    """

    name: ClassVar[str] = "once_an_epoch"

    @property
    def shared_request_bytes(self) -> float:
        """What a request costs where other jobs use the cache too, in bytes."""
        mean = 0.0 if self.sizes is None or not len(self.sizes) else float(self.sizes.mean())
        return min(self.request_bytes, _SHARED * mean)

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n]: minus the epoch of the next use, and within it the smallest first.

        Of ``upcoming`` it only counts whether it lies within the plan.
        """
        keys = self.keys_after(ids, np.ones(len(ids)))
        keys -= upcoming >= len(plan)
        keys -= _ALONE + plan.epoch
        return keys

    def _upcoming(
        self, ids: NDArray[np.uint32], plan: Plan, position: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return i64[n]: 0 for samples that this plan still uses, else its length."""
        again = plan.comes_again if position is not None else plan.has(ids)
        if again is None:
            return np.full(len(ids), len(plan))
        return np.where(again if position is None else again[position], 0, len(plan))


@dataclass(frozen=True)
class InPasses(OnceAnEpoch):
    """A fixed set for mixtures, whose sources are visited in passes of different lengths.

    A byte serves as often as its sample comes, so samples of the source with the shortest passes
    stay, then those of the next one; of one source the smallest, and of equal ones those that came
    first. Next use would hit as many, in one run as a pass begins. How long passes take is what a
    plan expects (:attr:`Plan.beyond <stoker.plan.Plan.beyond>`); without that this is
    :class:`OnceAnEpoch`. Keys hold for one plan. Raises :class:`~stoker.errors.ConfigError` for a
    negative cost.
    """

    name: ClassVar[str] = "in_passes"

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n]: minus the accesses of a pass, and within a source the smallest first."""
        later = plan if plan.beyond is not None or plan.following is None else plan.following
        if later.beyond is None:
            return super().keys_at(ids, plan, upcoming)
        keys = self.keys_after(ids, np.ones(len(ids)))
        keys -= later.beyond[ids]
        keys -= _ALONE
        return keys


@dataclass(frozen=True)
class AsPlanned(OnceAnEpoch):
    """The rule that suits the plan: :class:`OnceAnEpoch`, or :class:`NextUse` if samples repeat.

    ``request_bytes`` is the cost of a request where samples come once an epoch. Keys hold for one
    plan. Raises :class:`~stoker.errors.ConfigError` for a negative cost.
    """

    name: ClassVar[str] = "as_planned"

    repeated_bytes: float = 0.0
    """The cost of a request where samples repeat, in bytes, 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        NextUse(self.repeated_bytes)

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n], the keys that the rule for this plan gives."""
        if not plan.repeats:
            return super().keys_at(ids, plan, upcoming)
        return NextUse(self.repeated_bytes, self.sizes).keys_at(ids, plan, upcoming)

    def _upcoming(
        self, ids: NDArray[np.uint32], plan: Plan, position: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return i64[n], the places of the next uses, or what the rule for this plan needs."""
        if not plan.repeats:
            return super()._upcoming(ids, plan, position)
        return NextUse._upcoming(self, ids, plan, position)


@dataclass(frozen=True)
class NextBlock(NextUse):
    """Next use where plans have blocks, which are read at once: whole blocks stay.

    A block of which some samples are cached costs as much to read as one of which none is. So what
    the epoch in progress still needs has the time at which its block is first used: those that are
    begun come before others, and of these the latest leaves first, all of it. What is left for the
    next epoch comes after them, and stays where the least time passes from its block's first use in
    this epoch to that in the next: this is known before any of it is used, so that no block is
    given up when half of it has been kept. The rule is ours. Keys hold for one plan. Raises
    :class:`~stoker.errors.ConfigError` for a negative cost.
    """

    name: ClassVar[str] = "next_block"

    def keys_at(
        self, ids: NDArray[np.uint32], plan: Plan, upcoming: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return f64[n]: minus the time of the block, between the plan's start and its horizon."""
        times = upcoming.astype(np.float64)
        if plan.blocks is not None and len(plan):
            due = upcoming < len(plan)
            times[due] = plan.block_use[ids[due]]
        following = plan.following
        if following is not None and following.blocks is not None and len(following):
            later = (upcoming >= len(plan)) & (upcoming < plan.horizon)
            until = following.block_use[ids[later]] + len(plan) - _begun(plan, ids[later])
            times[later] = len(plan) + until / 2  # from 0 to twice the epoch
        return self._keys_of(ids, plan, times)


def _begun(plan: Plan, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return i64[n], where blocks of samples are first used; 0 if that was before ``plan``."""
    use = plan.block_use
    first: NDArray[np.int64] = use[np.minimum(ids, len(use) - 1)]
    first[(ids >= len(use)) | (first == len(plan))] = 0
    return first
