"""Batches of tokens: by a budget, in buckets of lengths, in rows packed full; and their arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import ConfigError
from stoker.sampler.batching import Arrays, Batching, Groups, Lengths, check_counts


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
        check_counts(budget=self.budget, window=self.window)
        if self.most is not None:
            check_counts(most=self.most)

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
        check_counts(length=self.length, rows=self.rows, window=self.window)
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


@dataclass(frozen=True)
class PaddedRows:
    """Makes ``n`` samples rows of one width. A value: safe in any thread or process, and pickles.

    A sample is its tokens, array-like ``[l]``, or the pair (tokens, target).
    """

    widths: tuple[int, ...] = ()
    """Ascending: the rows have the first that is enough; empty: that of the longest sample."""
    pad: int = 0
    """What fills rows up."""
    dtype: str = "int64"
    """Of the tokens returned."""

    def __call__(self, samples: Sequence[Any]) -> Arrays:
        """Return ``tokens`` ``[n, width]`` of :attr:`dtype` and ``lengths`` ``i64[n]``.

        Also ``targets`` ``[n, ...]`` if samples have them. ConfigError for samples that are no
        tokens, or too many.
        """
        rows, targets = _taken_apart(samples)
        lengths = np.array([len(row) for row in rows], np.int64)
        longest = int(lengths.max(initial=0))
        width = longest
        if self.widths:
            width = next((width for width in self.widths if width >= longest), 0)
            if width < longest:
                raise ConfigError(
                    f"a sample has {longest} tokens and the longest bucket is {self.widths[-1]}: "
                    "lengths= has to say how many tokens samples have when they are collated"
                )
        tokens = np.full((len(rows), width), self.pad, self.dtype)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row)] = row
        return {"tokens": tokens, "lengths": lengths, **targets}


@dataclass(frozen=True)
class PackedRows:
    """Lays samples one after another into ``rows`` rows of ``length`` tokens.

    A sample that does not fit into what is left of a row begins the next one, or with ``cut``
    continues there. A value: safe in any thread or process, and pickles.

    Samples are those that :class:`PaddedRows` takes.
    """

    length: int
    rows: int = 1
    cut: bool = False
    truncate: bool = False
    """Whether to drop the end of a sample that is longer than there can be room for."""
    pad: int = 0
    """What fills rows up."""
    dtype: str = "int64"
    """Of the tokens returned."""

    def __call__(self, samples: Sequence[Any]) -> Arrays:
        """Return ``tokens`` ``[rows, length]`` of :attr:`dtype`, and of each where it belongs.

        ``positions`` ``i32[rows, length]`` count in its sample, from 0; ``documents``
        ``i32[rows, length]`` are the number of its sample in the batch, -1 where there is none;
        ``targets`` ``[n, ...]`` come with samples that have them. ConfigError for samples that are
        no tokens, and where they do not fit.
        """
        rows, targets = _taken_apart(samples)
        shape, most = (self.rows, self.length), self.length * (self.rows if self.cut else 1)
        tokens = np.full(shape, self.pad, self.dtype)
        positions, documents = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        counted = np.arange(most, dtype=np.int32)
        begin = 0
        for number, row in enumerate(rows):
            row = row[:most] if self.truncate else row
            if not self.cut and begin % self.length + len(row) > self.length:
                begin += -begin % self.length
            end = begin + len(row)
            if len(row) > most or end > tokens.size:
                raise ConfigError(
                    f"{len(rows)} samples do not fit into {self.rows} rows of "
                    f"{self.length} tokens: lengths= has to say how many tokens samples have when "
                    "they are collated"
                )
            tokens.reshape(-1)[begin:end] = row
            positions.reshape(-1)[begin:end] = counted[: len(row)]
            documents.reshape(-1)[begin:end] = number
            begin = end
        return {"tokens": tokens, "positions": positions, "documents": documents, **targets}


def _taken_apart(samples: Sequence[Any]) -> tuple[list[NDArray[Any]], Arrays]:
    """Return the tokens of each sample, and their targets, if they have them, by name."""
    targets: Arrays = {}
    if samples and all(isinstance(sample, tuple) and len(sample) == 2 for sample in samples):
        targets = {"targets": np.stack([np.asarray(target) for _, target in samples])}
        samples = [tokens for tokens, _ in samples]
    rows = [np.asarray(sample) for sample in samples]
    for row in rows:
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ConfigError(
                f"a sample of shape {list(row.shape)} and type {row.dtype} is no row of tokens: "
                "decode= has to make an array of integers of it, or give a collate_fn= of your own"
            )
    return rows, targets


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return i64[n], the bin of each item, numbered from 0 as they were opened.

    The longest items come first, equal ones in the order given, and each goes where it leaves the
    least room. ``lengths`` i64[n] are 1 to ``capacity``. Source: best fit decreasing (Johnson,
    Near-optimal bin packing algorithms, 1973). The bins are found by a bit set of the rooms that
    they have left, so an item costs about 1 µs for each 8,000 of ``capacity``, and 1 µs.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # room left -> bins that have it
    rooms, opened = 0, 0  # bit i of rooms: with_room[i] is not empty
    chosen: list[int] = []
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same = with_room[room]
            own = same.pop()
            if not same:
                rooms ^= 1 << room
        else:
            own, room, opened = opened, capacity, opened + 1
        chosen.append(own)
        if left := room - length:
            if not (same := with_room[left]):
                rooms |= 1 << left
            same.append(own)
    bins[order] = chosen
    return bins


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
