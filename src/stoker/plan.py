"""The coming accesses of the whole job, as one immutable value in shared memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker._core as core
from stoker.errors import ConfigError
from stoker.shared import SharedArray, in_parts, scratch

_OPTIONAL = ("weights", "beyond", "blocks", "batches")
_SPARSE = 16  # times the accesses: the largest id up to which a table of all ids pays

_NEVER = np.float32(2**60)  # accesses; with a position added still 64 bits

MAX_LENGTH = 2**32 - 1
"""Most accesses in one plan: an id and a position are sorted as one 64-bit number."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Which sample is accessed at which position, for all ranks together.

    Immutable, so it is safe in any thread and process. The arrays are copied into shared memory,
    unless they come as a :class:`~stoker.shared.SharedArray`, which the plan then takes over;
    given to a child process they are shared and not copied. Compare plans by :attr:`identity`.

    Raises :class:`~stoker.errors.ConfigError` for a negative epoch or start, ids that are not
    one-dimensional integers of 32 bits, weights of another length, or weights or expectations
    that are negative or not finite, or batches that do not cover the ids.
    """

    epoch: int
    """Epoch this plan was made for, from 0."""
    start: int
    """Global position of its first access, over the whole job."""
    ids: NDArray[np.uint32]
    """u32[A], the sample of each access. Read-only."""
    weights: NDArray[np.float32] | None = None
    """f32[A], the weight of each access in the loss; None when all are one. Read-only."""
    following: Plan | None = field(default=None, repr=False)
    """The plan that comes after this one, where it is known already."""
    beyond: NDArray[np.float32] | None = field(default=None, repr=False)
    """f32[N], the accesses from the end of this plan to the next use of each sample that are to be
    expected, where the sampler can tell samples apart; None where not. Read-only."""
    repeats: bool = field(default=False, repr=False)
    """Whether the epoch visits samples several times; not where it was only filled up for ranks."""
    blocks: NDArray[np.uint32] | None = field(default=None, repr=False)
    """u32[A], the block of each access, where blocks of adjacent samples are read at once; None:
    each sample alone. Read-only."""
    batches: NDArray[np.int64] | None = field(default=None, repr=False)
    """i64[B + 1], from 0 to A: batch ``b`` has the accesses ``batches[b]`` to ``batches[b + 1]``;
    None: a batch has as many accesses as the loader says. Read-only."""
    _memory: dict[str, SharedArray] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("epoch", "start"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: count from 0")
        self._memory["ids"] = _in_memory(self.ids, np.dtype(np.uint32), "plan.ids")
        if self.weights is not None:
            weights = _in_memory(self.weights, np.dtype(np.float32), "plan.weights")
            if len(weights.array) != len(self._memory["ids"].array):
                raise ConfigError(
                    f"{len(weights.array)} weights for {len(self._memory['ids'].array)} ids: give "
                    "one for each"
                )
            _check_numbers(weights.array, "weight")
            self._memory["weights"] = weights
        if self.blocks is not None:
            blocks = _in_memory(self.blocks, np.dtype(np.uint32), "plan.blocks")
            if len(blocks.array) != len(self._memory["ids"].array):
                raise ConfigError(
                    f"{len(blocks.array)} blocks for {len(self._memory['ids'].array)} ids: give "
                    "one for each"
                )
            self._memory["blocks"] = blocks
        if self.batches is not None:
            batches = _in_memory(self.batches, np.dtype(np.int64), "plan.batches")
            _check_bounds(batches.array, len(self._memory["ids"].array))
            self._memory["batches"] = batches
        if self.beyond is not None:
            beyond = _in_memory(self.beyond, np.dtype(np.float32), "plan.beyond")
            _check_numbers(beyond.array, "expectation")
            self._memory["beyond"] = beyond
        self._show()

    def _show(self) -> None:
        """Make the fields read-only views of the shared memory."""
        for name in self._memory.keys() & {"ids", *_OPTIONAL}:
            # The class is frozen for its users; only construction and unpickling come here.
            object.__setattr__(self, name, _read_only(self._memory[name]))

    def __getstate__(self) -> tuple[int, int, Plan | None, bool, dict[str, SharedArray]]:
        return self.epoch, self.start, self.following, self.repeats, self._memory

    def __setstate__(
        self, state: tuple[int, int, Plan | None, bool, dict[str, SharedArray]]
    ) -> None:
        names = ("epoch", "start", "following", "repeats", "_memory")
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)
        for name in _OPTIONAL:
            object.__setattr__(self, name, None)
        self._show()

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, following: Plan | None) -> Plan:
        """Return this plan with the one that comes after it; nothing is copied."""
        return self._in_same_memory(self.start, following)

    def starting_at(self, start: int) -> Plan:
        """Return this plan with its first access at another global position; nothing is copied."""
        return self._in_same_memory(start, self.following)

    def unweighted(self, *, foreseeing: bool = False) -> Plan:
        """Return this plan without weights, whose memory it releases; nothing is copied.

        And without expectations, unless it is to be ``foreseeing``.
        """
        memory: dict[str, Any] = {name: self._memory.get(name) for name in ("ids", *_OPTIONAL)}
        memory["weights"] = None
        if not foreseeing:
            memory["beyond"] = None
        following, repeats = self.following, self.repeats
        return Plan(self.epoch, self.start, following=following, repeats=repeats, **memory)

    def _in_same_memory(self, start: int, following: Plan | None) -> Plan:
        memory: dict[str, Any] = {name: self._memory.get(name) for name in ("ids", *_OPTIONAL)}
        return Plan(self.epoch, start, following=following, repeats=self.repeats, **memory)

    def part(
        self, positions: NDArray[np.int64], start: int, batches: NDArray[np.int64] | None = None
    ) -> Plan:
        """Return the accesses at ``positions`` i64[n] as a plan that begins at ``start``.

        It has ``batches`` i64[B + 1], and does not know what follows.
        """
        weights = None if self.weights is None else self.weights[positions]
        blocks = None if self.blocks is None else self.blocks[positions]
        beyond: Any = self._memory.get("beyond")
        ids, repeats = self.ids[positions], self.repeats
        return Plan(self.epoch, start, ids, weights, None, beyond, repeats, blocks, batches)

    @property
    def next_use(self) -> NDArray[np.int64]:
        """i64[A], the position of the next access to the same id.

        Positions continue into the plan that follows. Where no next access is known it is the
        expected one, :attr:`horizon` or later. Computed at the first use, in shared memory; read
        it before starting children so that they share it. Read-only.
        """
        if "next_use" not in self._memory:
            later = self.ids[:0] if self.following is None else self.following.ids
            memory = _next_use(self.ids, later)
            if (beyond := self._beyond_horizon) is not None:
                for part in in_parts(len(self)):
                    uses = memory.array[part]
                    unknown = uses == self.horizon
                    uses[unknown] += _whole(beyond[self.ids[part][unknown]])
            self._memory["next_use"] = memory
        return _read_only(self._memory["next_use"])

    @property
    def horizon(self) -> int:
        """Accesses that are known: of this plan and of the one that follows."""
        return len(self) + (0 if self.following is None else len(self.following))

    def first_use(self, num_samples: int) -> NDArray[np.int64]:
        """Return i64[num_samples], the position of each id's first access.

        Where none is known it is the one expected, :attr:`horizon` or later.
        """
        if self.following is not None:
            first = self.following.first_use(num_samples)
            first += len(self)
        else:
            first = scratch(num_samples, np.int64)
            first.fill(self.horizon)
        if self.following is None and self.beyond is not None:
            known = min(num_samples, len(self.beyond))
            for part in in_parts(known):
                first[part] += _whole(self.beyond[part])
        core.first_use(self.ids, first)
        return first

    @cached_property
    def is_once_each(self) -> bool:
        """Whether no sample comes twice in this plan."""
        different = np.count_nonzero(self.visited(1 + int(self.ids.max(initial=0))))
        return int(different) == len(self)

    def visited(self, num_samples: int) -> NDArray[np.bool_]:
        """Return bool[num_samples], which samples come in this plan, of ids below that."""
        is_in: NDArray[np.bool_] = scratch(num_samples, np.bool_)
        core.write(is_in.view(np.uint8), self.ids, 1)
        return is_in

    @cached_property
    def comes_again(self) -> NDArray[np.bool_] | None:
        """bool[A], whether the sample of each access comes again in this plan; None: none does."""
        if self.is_once_each:
            return None
        return _next_use(self.ids, self.ids[:0]).array < len(self)

    def has(self, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return bool[n], which of the samples ``u32[n]`` come in this plan."""
        return self.visited(1 + int(max(part.max(initial=0) for part in (self.ids, ids))))[ids]

    @property
    def _beyond_horizon(self) -> NDArray[np.float32] | None:
        return self.beyond if self.following is None else self.following.beyond

    @cached_property
    def block_use(self) -> NDArray[np.int64]:
        """i64[M], the position at which the block of each sample is first accessed.

        By id, up to the largest of :attr:`ids`; the length of the plan for ids that are not in it,
        and each sample's own first position where there are no blocks.
        """
        first = np.full(1 + int(self.ids.max(initial=0)), len(self), np.int64)
        position = np.arange(len(self))
        if self.blocks is None:
            first[self.ids[::-1]] = position[::-1]
            return first
        opened = np.empty(1 + int(self.blocks.max(initial=0)), np.int64)
        opened[self.blocks[::-1]] = position[::-1]
        first[self.ids] = opened[self.blocks]
        return first

    @cached_property
    def identity(self) -> str:
        """Short hash, hexadecimal, of ids, batches and the epoch; a saved state carries it."""
        digest = hashlib.blake2b(self.epoch.to_bytes(8, "little"), digest_size=8)
        digest.update(np.ascontiguousarray(self.ids, dtype="<u4").data)
        if self.batches is not None:
            digest.update(np.ascontiguousarray(self.batches, dtype="<i8").data)
        return digest.hexdigest()

    def batch_view(self, rank: int, world_size: int) -> NDArray[np.int64]:
        """Return i64[n], the positions of one rank's accesses: every ``world_size``-th batch."""
        assert self.batches is not None, "there are no batches"
        begins = self.batches[:-1][rank::world_size]
        sizes = self.batches[1:][rank::world_size] - begins
        ends = np.cumsum(sizes)
        return np.repeat(begins - (ends - sizes), sizes) + np.arange(sizes.sum())

    def rank_view(self, rank: int, world_size: int, *, equal: bool = False) -> NDArray[np.uint32]:
        """Return u32[n], the accesses of one rank: every ``world_size``-th one from ``rank``.

        A strided view, nothing is copied. ConfigError unless 0 <= rank < world_size, and with
        ``equal`` unless every rank gets the same number, without which collectives would hang.
        """
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} is out of range: give at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank={rank} is out of range: give a rank from 0 to {world_size - 1}, "
                f"as world_size={world_size}"
            )
        if equal and len(self) % world_size:
            raise ConfigError(
                f"a plan of {len(self)} accesses gives world_size={world_size} ranks unequal "
                f"lengths: make it with pad_to={world_size}"
            )
        return self.ids[rank::world_size]


def _whole(times: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return i64[n], times in accesses; those that never come, very late."""
    return np.minimum(times, _NEVER).astype(np.int64)


def _read_only(memory: SharedArray) -> NDArray[Any]:
    view = memory.array.view()
    view.flags.writeable = False
    return view


def _in_memory(given: Any, dtype: np.dtype[Any], name: str) -> SharedArray:
    array = given.array if isinstance(given, SharedArray) else np.asarray(given)
    if array.ndim != 1 or array.size > MAX_LENGTH:
        raise ConfigError(
            f"{name} has shape {array.shape}: give one dimension, at most {MAX_LENGTH}"
        )
    if isinstance(given, SharedArray) and array.dtype == dtype:
        return given
    kinds = "iuf" if dtype.kind == "f" else "iu"
    if array.size and array.dtype.kind not in kinds:
        raise ConfigError(f"{name} has dtype {array.dtype}: give {dtype}")
    if array.size and array.dtype.kind == "i" and dtype.kind == "u":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(np.uint32).max:
            raise ConfigError(
                f"{name} from {low} to {high} is out of range: ids are 32 bits, from 0"
            )
    memory = SharedArray.create(array.shape, dtype, name=name)
    memory.array[:] = array
    return memory


def _check_bounds(given: NDArray[np.int64], length: int) -> None:
    if given[:1].sum() or given[-1:].sum() != length or (np.diff(given) < 1).any():
        raise ConfigError(f"batches {given} do not cover {length} ids: give bounds from 0 to that")


def _check_numbers(given: NDArray[np.float32], name: str) -> None:
    if not given.size or (given.min() >= 0 and given.max() < np.inf):  # not so with NaN
        return
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if wrong.size:
        raise ConfigError(
            f"{name} {given[wrong[0]]} at position {wrong[0]} is out of range: "
            "give finite numbers, not below 0"
        )


def _next_use(own: NDArray[np.uint32], later: NDArray[np.uint32]) -> SharedArray:
    """Return the next accesses of the samples ``own``, among these and the ``later`` ones.

    Where ids are so far apart that a table of all up to the largest would not pay, sorts (id,
    position) pairs as single numbers: the neighbour with the same id is the next.
    """
    wanted, length = len(own), len(own) + len(later)
    memory = SharedArray.create(wanted, np.int64, name="plan.next_use")
    if not wanted:
        return memory
    size = 1 + max(int(part.max()) for part in (own, later) if len(part))
    if size <= _SPARSE * length <= _SPARSE * MAX_LENGTH:
        core.next_use(own, later, memory.array)
        return memory
    memory.array.fill(length)
    ids = np.concatenate([own, later])
    pairs = ids.astype(np.uint64) << np.uint64(32)
    pairs |= np.arange(length, dtype=np.uint64)
    pairs.sort()
    same = np.flatnonzero(pairs[1:] >> np.uint64(32) == pairs[:-1] >> np.uint64(32))
    pairs &= np.uint64(0xFFFFFFFF)
    here, there = pairs[same], pairs[same + 1]
    within = here < wanted
    memory.array[here[within]] = there[within]
    return memory
