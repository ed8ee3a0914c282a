"""One batch: as it is planned, as workers are asked for it, and as it was served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
SPARES = 8
"""Replacements that travel with each batch: what the rank was given just before it."""


class BatchSpec(NamedTuple):
    """What one batch is to hold."""

    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set."""
    positions: NDArray[np.int64]
    """``i64[n]``, positions in the epoch's plan of the whole job."""
    weights: NDArray[np.float32] | None = None
    """``f32[n]``, or None when all are one."""
    keys: NDArray[np.float64] | None = None
    """``f64[n]``, of the cache policy after these accesses; None when it needs none."""
    first: int = 0
    """Position of the first sample among this rank's accesses of the epoch."""
    single: bool = False
    """Whether the sample itself is wanted, not a list of one (``batch_size=None``)."""
    spares: NDArray[np.uint32] | None = None
    """``u32[k]``, replacements for samples that fail; None: what the rank was given before."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One batch to load, as the main process sends it to a worker."""

    token: int
    """Names the batch within its loader."""
    epoch: int
    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set."""
    positions: NDArray[np.int64]
    """``i64[n]``, in the epoch's plan of the whole job; augmentation derives from them."""
    weights: NDArray[np.float32] | None
    """``f32[n]``, or None when all are one."""
    keys: NDArray[np.float64] | None
    """``f64[n]``, of the cache policy after these accesses; None when it needs none."""
    spares: NDArray[np.uint32]
    """``u32[k]``, replacements for samples that fail: those of the :class:`BatchSpec`, or what this
    rank served before."""
    first: int = 0
    """Position of the first sample among this rank's accesses of the epoch."""
    stamp: int = 0
    """:attr:`Claims.stamp <stoker.store.claims.Claims.stamp>` of the epoch; 0 without claims."""
    single: bool = False
    """Whether the sample itself is wanted, not a list of one (``batch_size=None``)."""
    is_aside: bool = False
    """Whether the batch is none of training's: its samples are to be rescored."""
    is_bare: bool = False
    """Whether it is to be read past the cache: to measure what that is worth, or as storage keeps
    up by itself."""


class Failure(NamedTuple):
    """A sample that could not be served."""

    id: int
    name: str
    """What its source calls it: a path, a key."""
    reason: str


class Use:
    """Whether the training loop uses what goes with its batches; one for all of a loader's."""

    weights = False
    """Whether it has asked for weights."""


@dataclass(frozen=True, eq=False, slots=True)
class ServedBatch:
    """What a batch of ``n`` samples is made of, whatever framework trains on it."""

    token: int
    """Names the batch within its loader."""
    epoch: int
    ids: NDArray[np.uint32]
    """``u32[n]``, ids of the base data set, of the samples really served."""
    outcomes: NDArray[np.int8]
    """``i8[n]``, a :class:`~stoker.types.Outcome` per sample."""
    positions: NDArray[np.int64]
    """``i64[n]``, positions in the epoch's plan of the whole job."""
    plan_weights: NDArray[np.float32] | None = None
    """``f32[n]``, or None when all are one."""
    use: Use | None = field(default=None, repr=False)
    """Where it is noted that weights were asked for."""

    def note_weights_used(self) -> None:
        """Note that the training loop asked for the weights of a batch."""
        if self.use is not None:
            self.use.weights = True

    def __len__(self) -> int:
        return len(self.ids)


def sample_seeds(seed: int, epoch: int, positions: NDArray[np.int64]) -> list[int]:
    """Return a 64-bit seed for each of ``positions``, ``i64[n]``, in the epoch's plan.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a counter, keyed by seed and epoch.
    """
    steps = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: list[int] = _mix(_key(seed, epoch) + steps).tolist()
    return mixed


@lru_cache(maxsize=8)
def _key(seed: int, epoch: int) -> np.uint64:
    mixed = _mix(np.array([seed & _WORD, epoch & _WORD], np.uint64))
    key: np.uint64 = mixed[0] ^ _mix(mixed[1:])[0]
    return key


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _never(number: int, ids: NDArray[np.uint32]) -> bool:
    """Return False: no batch is read past the cache."""
    return False


class RequestSampler:
    """The Requests of an epoch's batches; also a batch sampler for torch."""

    def __init__(self) -> None:
        self._epoch: _Epoch | None = None

    def begin(
        self,
        token: int,
        epoch: int,
        specs: Callable[[], Iterator[BatchSpec]],
        given: NDArray[np.uint32],
        *,
        stamp: int = 0,
        is_aside: bool = False,
        bare: Callable[[int, NDArray[np.uint32]], bool] = _never,
    ) -> None:
        """Set the epoch that the next iterators walk, whose first batch is called ``token``.

        ``given`` are ids ``u32[n]`` that this rank got earlier in the epoch; ``stamp`` is what
        claims know it by; ``is_aside``: the
        batches are none of training's; ``bare`` says, given the number of a batch in this call and
        its ids, whether it is read past the cache. torch asks for
        an iterator twice in a row at times and uses the second, so ``specs`` is called for the
        first batch and not before.
        """
        self._epoch = _Epoch(token, epoch, specs, given[-SPARES:], stamp, is_aside, bare)

    def __iter__(self) -> Iterator[Request]:
        assert self._epoch is not None, "begin() comes first"
        return _requests(self._epoch)


class _Epoch(NamedTuple):
    token: int
    number: int
    specs: Callable[[], Iterator[BatchSpec]]
    given: NDArray[np.uint32]
    stamp: int
    is_aside: bool
    bare: Callable[[int, NDArray[np.uint32]], bool]


def _requests(epoch: _Epoch) -> Iterator[Request]:
    specs, given = epoch.specs(), epoch.given
    ahead = list(islice(specs, 2))
    # The first batch of all has none before it, so the second stands in.
    spares = given if len(given) or not ahead else ahead[-1].ids[:SPARES]
    for number, spec in enumerate(chain(ahead, specs)):
        yield Request(
            token=epoch.token + number,
            epoch=epoch.number,
            ids=spec.ids,
            positions=spec.positions,
            weights=spec.weights,
            keys=spec.keys,
            spares=spares if spec.spares is None else spec.spares,
            first=spec.first,
            stamp=epoch.stamp,
            single=spec.single,
            is_aside=epoch.is_aside,
            is_bare=epoch.bare(number, spec.ids),
        )
        spares = given = np.concatenate([given, spec.ids])[-SPARES:]
