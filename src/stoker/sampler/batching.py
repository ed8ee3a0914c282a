"""Batches by the lengths of samples: a budget of tokens, buckets, rows packed full."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.sampler.best_fit import best_fit
from stoker.sampler.rows import Arrays, PackedRows, PaddedRows

Lengths = NDArray[np.int64]


class Groups(NamedTuple):
    """The accesses of an epoch put into batches."""

    order: NDArray[np.int64]
    """``i64[A]``, places in the order that they were grouped from, each once at most."""
    bounds: NDArray[np.int64]
    """``i64[B + 1]``, from 0 to A: batch ``b`` is ``order[bounds[b] : bounds[b + 1]]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Batching(ABC):
    """Puts the samples of an epoch into batches by their lengths.

    The order that samples are drawn in is grouped, for the whole job and before the epoch begins:
    batches are a part of the plan. Every sample is in one batch, as often as it was drawn. Where
    the batches of an epoch do not divide among the ranks, those of the last step are split, so that
    all ranks have equally many; samples are repeated only where a step has fewer than there are
    ranks. Immutable, and safe in any thread or process.

    Raises :class:`~stoker.errors.ConfigError` for what makes no sense, at construction, and for
    lengths that do not fit, at that of the Loader or Feed.
    """

    lengths: ArrayLike | None = field(default=None, repr=False)
    """``int[N]``, tokens of each sample of the data set; None: its bytes / ``token_bytes``."""
    token_bytes: int = 1
    """Bytes of a token in the bytes of a sample, where there are no ``lengths``."""
    pad: int = 0
    """The token that fills rows up."""
    dtype: str = "int64"
    """Of the tokens in a batch."""

    def __post_init__(self) -> None:
        _check_counts(token_bytes=self.token_bytes)
        if np.dtype(self.dtype).kind not in "iu":
            raise ConfigError(f"dtype={self.dtype!r} is no type of integers: tokens are")

    # --- what a kind of batching says ---

    @property
    @abstractmethod
    def places(self) -> int:
        """Tokens that a full batch has room for."""

    @property
    @abstractmethod
    def collate(self) -> Callable[[Sequence[Any]], Arrays]:
        """What makes arrays of the samples of a batch."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sample that fits."""

    @abstractmethod
    def group(
        self, lengths: Lengths, rng: np.random.Generator | None, *, drop_last: bool = False
    ) -> Groups:
        """Return batches of accesses whose samples have ``lengths`` ``i64[A]``, 1 or more.

        Without ``rng`` nothing is shuffled. ``drop_last`` leaves out batches that are not full,
        where that says something.
        """

    @abstractmethod
    def places_of(self, lengths: Lengths) -> int:
        """Return the tokens that a batch of samples of ``lengths`` ``i64[n]`` has room for."""

    # --- what all have ---

    def lengths_of(self, sizes: NDArray[np.int64], *, are_exact: bool = True) -> Lengths:
        """Return i64[N], the tokens of samples of so many bytes (``sizes`` i64[N]), 1 or more.

        ConfigError where lengths are not known, or one does not fit.
        """
        if self.lengths is None:
            if not are_exact:
                raise ConfigError(
                    "the sizes of these samples are estimates, which are no lengths: give "
                    f"{type(self).__name__}(lengths=), the tokens of each sample"
                )
            lengths = sizes // self.token_bytes
        else:
            lengths = _integers(self.lengths, len(sizes))
        return np.maximum(self.fitted(lengths), 1)

    def fitted(self, lengths: Lengths) -> Lengths:
        """Return ``lengths`` i64[N]; ConfigError where one does not fit into a batch."""
        over = np.flatnonzero(lengths > self.longest)
        if len(over):
            raise ConfigError(
                f"{len(over)} samples are too long for {self}: sample {over[0]} has "
                f"{lengths[over[0]]} tokens and {self.longest} fit; shorten them in your "
                "transform, and give lengths=np.minimum(lengths, "
                f"{self.longest})"
            )
        return lengths


@dataclass(frozen=True, eq=False)
class TokenBudget(Batching):
    """Batches of samples of similar length that take at most ``budget`` tokens, padding included.

    A batch of n samples, the longest of which has l tokens, takes n x l. Each ``window`` accesses
    of the drawn order are sorted by length, put into batches and these are shuffled. A batch of
    the default collate function is ``{"tokens": [n, l], "lengths": i64[n]}``, with ``"targets"``
    if samples are pairs (tokens, target).
    """

    budget: int
    """Tokens of a batch at most."""
    most: int | None = None
    """Samples of a batch at most; None: any number."""
    window: int = 8192
    """Accesses that are sorted together: more pad less, and mix less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(budget=self.budget, window=self.window)
        if self.most is not None:
            _check_counts(most=self.most)

    @property
    def places(self) -> int:
        """Tokens that a full batch has room for."""
        return self.budget

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that fits."""
        return self.budget

    @property
    def collate(self) -> PaddedRows:
        """What makes arrays of the samples of a batch."""
        return PaddedRows((), self.pad, self.dtype)

    def group(
        self, lengths: Lengths, rng: np.random.Generator | None, *, drop_last: bool = False
    ) -> Groups:
        """Return batches of accesses whose samples have ``lengths``; see :class:`Batching`."""
        parts, most = [], len(lengths) if self.most is None else self.most
        for first in range(0, len(lengths), self.window):
            window = lengths[first : first + self.window]
            by_length = np.argsort(-window, kind="stable")
            descending = window[by_length].tolist()
            begins, begin = [], 0
            while begin < len(descending):
                begins.append(begin)
                begin += min(most, self.budget // descending[begin])
            numbers = np.zeros(len(window), np.int64)
            numbers[begins[1:]] = 1
            of_batch = np.empty(len(window), np.int64)
            of_batch[by_length] = np.cumsum(numbers)
            parts.append((first, of_batch))
        return _in_turn(parts, rng)

    def places_of(self, lengths: Lengths) -> int:
        """Return the tokens that a batch of samples of these ``lengths`` has room for."""
        return len(lengths) * int(lengths.max(initial=0))


@dataclass(frozen=True, eq=False)
class Buckets(Batching):
    """Batches whose samples fall into one bucket of lengths and are padded to its bound.

    A batch of the bucket up to ``bounds[b]`` has ``budget // bounds[b]`` samples, so there are as
    many shapes as buckets; with ``drop_last`` no others, as batches that are not full are left
    out. They come at the end of the epoch; the others when their last sample is due in the drawn
    order. A batch of the default collate function is ``{"tokens": [n, bounds[b]], "lengths":
    i64[n]}``, with ``"targets"`` if samples are pairs (tokens, target).
    """

    bounds: Sequence[int]
    """Ascending: the tokens of the longest sample of each bucket."""
    budget: int
    """Tokens of a batch at most, padding included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = tuple(self.bounds)
        if not bounds or bounds[0] < 1 or any(low >= high for low, high in pairwise(bounds)):
            raise ConfigError(f"bounds={self.bounds!r}: give ascending lengths, from 1")
        if self.budget < bounds[-1]:
            raise ConfigError(
                f"budget={self.budget} has no room for one sample of {bounds[-1]} tokens: give "
                "that or more"
            )

    @property
    def places(self) -> int:
        """Tokens that a full batch has room for."""
        return self.budget

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that fits."""
        return self.bounds[-1]

    @property
    def collate(self) -> PaddedRows:
        """What makes arrays of the samples of a batch."""
        return PaddedRows(tuple(self.bounds), self.pad, self.dtype)

    def group(
        self, lengths: Lengths, rng: np.random.Generator | None, *, drop_last: bool = False
    ) -> Groups:
        """Return batches of accesses whose samples have ``lengths``; see :class:`Batching`."""
        buckets = np.searchsorted(self.bounds, lengths)
        batches: list[tuple[bool, int, NDArray[np.int64]]] = []
        for bucket, bound in enumerate(self.bounds):
            own, size = np.flatnonzero(buckets == bucket), self.budget // bound
            for begin in range(0, len(own), size):
                batch = own[begin : begin + size]
                batches.append((len(batch) < size, int(batch[-1]), batch))
        batches.sort(key=lambda batch: batch[:2])
        taken = [batch for is_short, _, batch in batches if not (is_short and drop_last)]
        return Groups(
            np.concatenate([*taken, np.empty(0, np.int64)]),
            _bounds([len(batch) for batch in taken]),
        )

    def places_of(self, lengths: Lengths) -> int:
        """Return the tokens that a batch of samples of these ``lengths`` has room for."""
        bucket = int(np.searchsorted(self.bounds, lengths.max(initial=0)))
        return len(lengths) * self.bounds[bucket]


@dataclass(frozen=True, eq=False)
class Packing(Batching):
    """Batches of ``rows`` rows of ``length`` tokens, each filled with several samples.

    Each ``window`` accesses of the drawn order are packed by best fit, and the rows shuffled. With
    ``cut`` a sample may end one row and continue in the next of the same batch, so that only the
    end of a batch is padded; else each lies in one row. A batch of the default collate function is
    ``{"tokens": [rows, length], "positions": i32[rows, length], "documents": i32[rows, length]}``:
    the place of each token in its sample, and the number of its sample in the batch, -1 for
    padding. Numbers count the samples as ``meta.ids`` does, or the batch's ``ids``. ``drop_last``
    leaves out the last batch if it has fewer rows.
    """

    length: int
    """Tokens of a row."""
    rows: int = 1
    """Rows of a batch."""
    cut: bool = False
    """Whether samples may be cut at the end of a row, to continue in the next."""
    longer: Literal["raise", "truncate"] = "raise"
    """What becomes of samples longer than a row, or with ``cut`` than a batch."""
    window: int = 65536
    """Accesses that are packed together: more leave fewer gaps, and mix less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(length=self.length, rows=self.rows, window=self.window)
        if self.longer not in ("raise", "truncate"):
            raise ConfigError(f"longer={self.longer!r} is not known: use 'raise' or 'truncate'")

    @property
    def places(self) -> int:
        """Tokens that a full batch has room for."""
        return self.rows * self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that fits."""
        return self.places if self.cut else self.length

    @property
    def collate(self) -> PackedRows:
        """What makes arrays of the samples of a batch."""
        truncate = self.longer == "truncate"
        return PackedRows(self.length, self.rows, self.cut, truncate, self.pad, self.dtype)

    def fitted(self, lengths: Lengths) -> Lengths:
        """Return ``lengths``, with ``longer="truncate"`` as far as they fit."""
        if self.longer == "truncate":
            return np.minimum(lengths, self.longest)
        return super().fitted(lengths)

    def group(
        self, lengths: Lengths, rng: np.random.Generator | None, *, drop_last: bool = False
    ) -> Groups:
        """Return batches of accesses whose samples have ``lengths``; see :class:`Batching`."""
        parts = [
            (first, best_fit(lengths[first : first + self.window], self.longest))
            for first in range(0, len(lengths), self.window)
        ]
        packed = _in_turn(parts, rng)
        if self.cut:
            return packed
        # A row never begins in the one before: laid out in this order, rows of a batch fit.
        bounds = packed.bounds[:: self.rows]
        if (len(packed.bounds) - 1) % self.rows and not drop_last:
            bounds = np.append(bounds, packed.bounds[-1])
        return Groups(packed.order[: bounds[-1]], bounds)

    def places_of(self, lengths: Lengths) -> int:
        """Return the tokens that a batch has room for, full or not."""
        return self.places


def _in_turn(
    parts: Sequence[tuple[int, NDArray[np.int64]]], rng: np.random.Generator | None
) -> Groups:
    """Return groups of accesses: of each part, where it begins, and the group of each access.

    The groups of a part, numbered from 0, come in random order, and so do accesses in a group; as
    they are without ``rng``.
    """
    orders, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first, groups in parts:
        if rng is not None:
            turns = rng.permutation(1 + int(groups.max()))
            groups = turns[groups]
            mixed = rng.permutation(len(groups))
            order = mixed[np.argsort(groups[mixed], kind="stable")]
        else:
            order = np.argsort(groups, kind="stable")
        orders.append(first + order)
        sizes.append(np.bincount(groups))
    return Groups(np.concatenate(orders), _bounds(np.concatenate(sizes)))


def _bounds(sizes: ArrayLike) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))])


def _integers(given: ArrayLike, num_samples: int) -> Lengths:
    array = np.asarray(given)
    if array.shape != (num_samples,) or array.dtype.kind not in "iu":
        raise ConfigError(
            f"lengths of shape {list(array.shape)} and type {array.dtype} do not fit {num_samples} "
            "samples: give the number of tokens of each"
        )
    if array.min(initial=0) < 0:
        raise ConfigError(f"lengths has {array.min()}: give numbers of tokens, 0 or more")
    return array.astype(np.int64)


def _check_counts(**given: int) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name}={value!r} is out of range: give 1 or more")
