"""Samples of a batch as rows of tokens: padded, or packed several to a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

Arrays = dict[str, NDArray[Any]]


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
